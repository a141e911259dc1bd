"""Cross-row interaction: the tapes of data-parallel ranks of models that are not batch-independent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.propagate.predict import predict_run
from meshwright_dtensor.propagate.prediction import MeshShape, PredictedRun
from meshwright_dtensor.rules import RuleBook
from meshwright_dtensor.sharding.states import I, States
from meshwright_dtensor.trace.function_kinds import is_in_place
from meshwright_dtensor.trace.graph import Node
from meshwright_planner.trace.data_rank import (
    DataRankTape,
    is_batch_independent,
    is_negligible,
    local_states,
    with_moves,
)
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

NOT_PREDICTED_EXPERTS = (
    "the cost of cross-row interaction is not predicted: with fewer rows the model does other operations, and experts run on the "
    "rows of each rank"
)


def initial_states(global_tape: Tape, states: Mapping[str, States], axes: int) -> dict[int, States]:
    """Value -> states of parameters and inputs; `states`: name of a batch tensor -> its states."""
    start: dict[int, States] = {}
    for i, value in enumerate(global_tape.values):
        kind, _, name = (value.name or "").partition(":")
        if kind == "param":  # gradients are summed later
            start[i] = ("X",) * axes
        elif kind == "input":
            start[i] = states[name]
    return start


def predict_rank(
    rank_tape: Tape,
    global_tape: Tape,
    merged: Quotient,
    grid: MeshShape,
    book: RuleBook,
    start: Mapping[int, States],
    prefixes: tuple[str, ...] = (),
) -> PredictedRun:
    """The prediction of the core for the rows of `global_tape`; a rank of `grid` has those of `rank_tape`.

    Args:
        merged: the quotient of `global_tape`.
        start: value -> states of parameters and inputs.
        prefixes: of the names of modules that strategies run on each rank's rows.
    """
    weights = {i for i in start if (global_tape.values[i].name or "").startswith("param:")}

    def strategy_states(index: int) -> tuple[tuple[States, ...], tuple[States, ...]] | None:
        inside = bool(prefixes) and f"{global_tape.nodes[index].module}.".startswith(prefixes)
        return local_states(rank_tape, global_tape, index, grid.ndim) if inside else None

    return predict_run(
        grid,
        book,
        global_tape.nodes,
        global_tape.values,
        global_tape.grad,
        start,
        weights,
        strategy_states,
        merged.node,
        global_tape.results,
    )


def lost_write(
    prediction: PredictedRun, global_tape: Tape, start: Mapping[int, States], grid: MeshShape
) -> int | None:
    """The first view of moved rows that is written through: the core refuses it at run time."""
    states_of = dict(start)
    for k, node in enumerate(global_tape.nodes):
        # the core converts the result of an in-place call back
        if k in global_tape.through and not (node.call is not None and is_in_place(node.call.function)):
            stored = states_of.get(node.ins[0].i, (I,) * grid.ndim)
            if any(isinstance(state, int) for state in stored) and stored != prediction.ins[k][0]:
                return k
        states_of.update((ref.i, states) for ref, states in zip(node.outs, prediction.outs[k], strict=True))
    return None


def _refused(view: Node, grid: MeshShape) -> PlanError:
    where = f" in {view.module}" if view.module else ""
    name = view.name if view.call is None else view.call.function
    rule = (
        f"the model writes in place to a view of the batch rows ({name}{where}). A rank holds only copies of the rows of other "
        "ranks, and the write would be lost. Use x[index] = value instead"
    )
    return PlanError(f"degrees.{grid.axes[0]}", grid.sizes[0], rule, "1")


class DataRankTapes:
    """The tapes of one model's data ranks, shared by the variants of a search."""

    def __init__(self, merged: Callable[[Tape], Quotient]) -> None:
        """`merged`: tape -> its quotient."""
        self._merged = merged
        self._couplings: dict[object, Coupling] = {}
        self._tapes: dict[object, Tape] = {}

    def meet(
        self,
        key: object,
        few: Tape,
        more: Tape,
        counted: Mapping[str, bool],
        book: RuleBook,
        modules: Sequence[str],
    ) -> Coupling:
        """How much the rows of a model interact, by two tapes; one has twice the rows of the other.

        Determined once, for two ranks: when more ranks have to move rows, two have to. `counted`: whether a batch tensor has
        the rows of the batch; `key`: of the cache; `modules`: those that strategies run on each rank's rows.
        """
        if key not in self._couplings:
            grid = MeshShape(("rows",), (2,))
            start = initial_states(more, {name: (0 if rows else "I",) for name, rows in counted.items()}, 1)
            prefixes = tuple(f"{module}." for module in modules) if same_program(few, more) else ()
            prediction = predict_rank(few, more, self._merged(more), grid, book, start, prefixes)
            if is_batch_independent(prediction, few, more, grid):
                self._couplings[key] = "never"
            else:  # a lost write is never negligible
                slight = (
                    is_negligible(prediction, few, more, grid)
                    and lost_write(prediction, more, start, grid) is None
                )
                self._couplings[key] = "little" if slight else "much"
        return self._couplings[key]

    def of(
        self,
        key: object,
        rank_tape: Tape,
        global_tape: Callable[[], Tape],
        grid: MeshShape,
        book: RuleBook,
        states: Mapping[str, States],
        modules: Sequence[str],
    ) -> Tape:
        """The tape of one rank.

        Args:
            key: of the cache.
            rank_tape: recorded with the rows of one rank; whole: with those of all, where it is not known yet.
            grid: the axes that divide rows.
            states: name of a batch tensor -> its states on the grid.
            modules: those that strategies run on each rank's rows.

        Raises:
            PlanError: the model writes to rows of other ranks through views.
        """
        if key not in self._tapes:
            work = math.prod(grid.sizes) * sum(
                forward_flops(node, rank_tape.values, by_name(book.composites)) for node in rank_tape.nodes
            )
            if rank_tape.real and work > REAL_WORK:
                self._tapes[key] = replace(
                    rank_tape, origin=None, division=Division(notes=(NOT_PREDICTED_COST,))
                )
            else:
                self._tapes[key] = self._made(rank_tape, global_tape(), grid, book, states, modules)
        return self._tapes[key]

    def _made(
        self,
        rank_tape: Tape,
        global_tape: Tape,
        grid: MeshShape,
        book: RuleBook,
        states: Mapping[str, States],
        modules: Sequence[str],
    ) -> Tape:
        prefixes = tuple(f"{module}." for module in modules)
        same = same_program(rank_tape, global_tape)
        if (
            not same
            and prefixes
            and any(f"{node.module}.".startswith(prefixes) for node in global_tape.nodes)
        ):
            return replace(rank_tape, origin=None, division=Division(notes=(NOT_PREDICTED_EXPERTS,)))
        start = initial_states(global_tape, states, grid.ndim)
        prediction = predict_rank(
            rank_tape, global_tape, self._merged(global_tape), grid, book, start, prefixes
        )
        if same and is_batch_independent(prediction, rank_tape, global_tape, grid):
            return rank_tape
        view = lost_write(prediction, global_tape, start, grid)
        if view is not None:
            raise _refused(global_tape.nodes[view], grid)
        if same and (
            len(rank_tape.nodes) > SMALL and is_negligible(prediction, rank_tape, global_tape, grid)
        ):
            return with_moves(rank_tape, global_tape, prediction, grid)
        rank_run = rank_tape if same else None
        return DataRankTape(
            global_tape, rank_run, rank_tape.rows, start, prediction, grid, by_name(book.composites)
        ).tape()
