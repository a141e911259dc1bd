"""Cross-row interaction: the tapes of data-parallel ranks of models that are not batch-independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.propagate.choose import MeshShape
from meshwright_dtensor.propagate.predict import Predictor
from meshwright_dtensor.rules import RuleBook
from meshwright_dtensor.sharding.states import States
from meshwright_planner.trace.data_rank import DataRank, NodeStates, local_states
from meshwright_planner.trace.flops import by_name, forward_flops
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.scale_batch import same_program
from meshwright_planner.trace.tape import Division, Tape

NOT_PREDICTED_COST = (
    "the cost of cross-row interaction is not predicted: the model reads its data, and a run of the whole batch here would "
    "take long"
)

REAL_WORK = 1e11
"""Most FLOPs of a real run of all rows for this: some seconds on a CPU."""

SMALL = 500
"""Up to this number of operations a model is predicted exactly, even when its cross-row interaction is negligible."""

Coupling = Literal["never", "little", "much"]

InputStates = Mapping[str, States]
"""Name of a batch tensor -> its states on the grid."""

NOT_PREDICTED_EXPERTS = (
    "the cost of cross-row interaction is not predicted: with fewer rows the model does other operations, and experts run on the "
    "rows of each rank"
)


class DataRankTapes:
    """The tapes of one model's data ranks, shared by the variants of a search."""

    def __init__(self, merged: Callable[[Tape], Quotient], book: RuleBook) -> None:
        """`merged`: tape -> its quotient."""
        self._merged, self._book, self._composites = merged, book, by_name(book.composites)
        self._couplings: dict[object, Coupling] = {}
        self._tapes: dict[object, Tape] = {}

    def meet(
        self, key: object, few: Tape, more: Tape, counted: Mapping[str, bool], modules: Sequence[str]
    ) -> Coupling:
        """How much the rows of a model interact, by two tapes; one has twice the rows of the other.

        Determined once, for two ranks: when more ranks have to move rows, two have to. `counted`: whether a batch tensor has
        the rows of the batch; `key`: of the cache; `modules`: those that strategies run on each rank's rows.
        """
        if key not in self._couplings:
            same = same_program(few, more)
            states: dict[str, States] = {name: (0 if rows else "I",) for name, rows in counted.items()}
            grid, prefixes = MeshShape(("rows",), (2,)), _prefixes(modules) if same else ()
            rank = self._rank((few, more, same), grid, states, prefixes)
            if rank.is_batch_independent():
                self._couplings[key] = "never"
            else:
                # a lost write is never negligible
                negligible = rank.is_negligible() and rank.lost_write() is None
                self._couplings[key] = "little" if negligible else "much"
        return self._couplings[key]

    def of(
        self,
        key: object,
        rank_tape: Tape,
        global_tape: Callable[[], Tape],
        grid: MeshShape,
        states: InputStates,
        modules: Sequence[str],
    ) -> Tape:
        """The tape of one rank.

        Args:
            key: of the cache.
            rank_tape: recorded with the rows of one rank.
            global_tape: records or returns the tape with the rows of all ranks.
            grid: the axes that divide rows.
            modules: those that strategies run on each rank's rows.

        Raises PlanError: the model writes to rows of other ranks through views.
        """
        if key not in self._tapes:
            values, composites = rank_tape.values, self._composites
            work = sum(forward_flops(node, values, composites) for node in rank_tape.nodes)
            if rank_tape.real and math.prod(grid.sizes) * work > REAL_WORK:
                self._tapes[key] = _with_note(rank_tape, NOT_PREDICTED_COST)
            else:
                self._tapes[key] = self._made(rank_tape, global_tape(), grid, states, modules)
        return self._tapes[key]

    def _made(
        self, rank_tape: Tape, global_tape: Tape, grid: MeshShape, states: InputStates, modules: Sequence[str]
    ) -> Tape:
        same, prefixes = same_program(rank_tape, global_tape), _prefixes(modules)
        if not same and prefixes and any(f"{n.module}.".startswith(prefixes) for n in global_tape.nodes):
            return _with_note(rank_tape, NOT_PREDICTED_EXPERTS)
        rank = self._rank((rank_tape, global_tape, same), grid, states, prefixes)
        if same and rank.is_batch_independent():
            return rank_tape
        view = rank.lost_write()
        if view is not None:
            where = f" in {view.module}" if view.module else ""
            name = view.name if view.call is None else view.call.function
            rule = (
                f"the model writes in place to a view of the batch rows ({name}{where}). A rank holds only copies of the rows of "
                "other ranks, and the write would be lost. Use x[index] = value instead"
            )
            raise PlanError(f"degrees.{grid.axes[0]}", grid.sizes[0], rule, "1")
        if same and len(rank_tape.nodes) > SMALL and rank.is_negligible():
            return rank.with_moves()
        return rank.tape()

    def _rank(
        self, run: tuple[Tape, Tape, bool], grid: MeshShape, states: InputStates, prefixes: tuple[str, ...]
    ) -> DataRank:
        """The data rank with the prediction of the core; `run`: rank tape, global tape, and whether they are of one program."""
        rank_tape, global_tape, same = run
        values, nodes = global_tape.values, global_tape.nodes
        weights, initial = set[int](), dict[int, States]()
        for i, value in enumerate(values):
            kind, _, name = (value.name or "").partition(":")
            # gradients are summed later
            if kind == "param":
                weights.add(i)
                initial[i] = ("X",) * grid.ndim
            elif kind == "input":
                initial[i] = states[name]

        def strategy_states(index: int) -> NodeStates | None:
            inside = bool(prefixes) and f"{nodes[index].module}.".startswith(prefixes)
            return local_states(rank_tape, global_tape, index, grid.ndim) if inside else None

        run_of = (nodes, values, global_tape.grad, initial, weights, strategy_states)
        node_of, results = self._merged(global_tape).node, global_tape.results
        prediction = Predictor(grid, self._book, *run_of, node_of, results).run()
        return DataRank(global_tape, rank_tape, same, initial, prediction, grid, self._composites)


def _with_note(tape: Tape, note: str) -> Tape:
    return replace(tape, origin=None, division=Division(notes=(note,)))


def _prefixes(modules: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{module}." for module in modules)
