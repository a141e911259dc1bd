"""Where rows of a batch meet: the tapes of data ranks of models that do not go row by row."""

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
from meshwright_planner.trace.data_rank import Dividing, apart, little, plain, with_moves
from meshwright_planner.trace.flops import by_name, forward_flops
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.scale_batch import alike
from meshwright_planner.trace.tape import Division, Tape

MUCH = (
    "what data ranks do where rows meet is not predicted: the model looks at its data, and a run of the whole batch here would "
    "take long"
)

REAL_WORK = 1e11
"""Operations that a real run of all rows may take for this: some seconds of a processor."""

SMALL = 500
"""Operations of a model that is looked at exactly, however little its rows meet: that takes no time."""

Meeting = Literal["never", "little", "much"]

UNLIKE = (
    "what data ranks do where rows meet is not predicted: with fewer rows the model does other operations, and experts run on the "
    "rows of each rank"
)


def starting(whole: Tape, states: Mapping[str, States], axes: int) -> dict[int, States]:
    """Value -> states of parameters and inputs; `states`: name of a batch tensor -> its states."""
    start: dict[int, States] = {}
    for i, value in enumerate(whole.values):
        kind, _, name = (value.name or "").partition(":")
        if kind == "param":  # gradients are summed later
            start[i] = ("X",) * axes
        elif kind == "input":
            start[i] = states[name]
    return start


def follows(
    own: Tape,
    whole: Tape,
    merged: Quotient,
    grid: MeshShape,
    book: RuleBook,
    start: Mapping[int, States],
    prefixes: tuple[str, ...] = (),
) -> PredictedRun:
    """What the core does with the rows of `whole`, of which a rank of `grid` has those of `own`.

    Args:
        merged: the quotient of `whole`.
        start: value -> states of parameters and inputs.
        prefixes: of the names of what strategies run on each rank's rows.
    """
    weights = {i for i in start if (whole.values[i].name or "").startswith("param:")}

    def known(index: int) -> tuple[tuple[States, ...], tuple[States, ...]] | None:
        inside = bool(prefixes) and f"{whole.nodes[index].module}.".startswith(prefixes)
        return apart(own, whole, index, grid.ndim) if inside else None

    return predict_run(
        grid, book, whole.nodes, whole.values, whole.grad, start, weights, known, merged.node, whole.results
    )


def lost(found: PredictedRun, whole: Tape, start: Mapping[int, States], grid: MeshShape) -> int | None:
    """The first view of rows that were moved which something is written to through: the core refuses it when it runs."""
    lies = dict(start)
    for k, node in enumerate(whole.nodes):
        # what a call writes in place of itself, the core brings back
        if k in whole.through and not (node.call is not None and is_in_place(node.call.function)):
            stored = lies.get(node.ins[0].i, (I,) * grid.ndim)
            if any(isinstance(state, int) for state in stored) and stored != found.ins[k][0]:
                return k
        lies.update((ref.i, states) for ref, states in zip(node.outs, found.outs[k], strict=True))
    return None


def _refused(view: Node, grid: MeshShape) -> PlanError:
    where = f" in {view.module}" if view.module else ""
    name = view.name if view.call is None else view.call.function
    rule = (
        f"the model writes to what {name}{where} takes out of the rows of the batch, and a rank has copies of those of other "
        "ranks, which a write would not leave; x[index] = value works on rows that are divided"
    )
    return PlanError(f"degrees.{grid.axes[0]}", grid.sizes[0], rule, "1")


class Rows:
    """The tapes of one model's data ranks. A variant of a search shares them."""

    def __init__(self, merged: Callable[[Tape], Quotient]) -> None:
        """`merged`: tape -> its quotient."""
        self._merged = merged
        self._met: dict[object, Meeting] = {}
        self._divided: dict[object, Tape] = {}

    def meet(
        self,
        key: object,
        few: Tape,
        more: Tape,
        counted: Mapping[str, bool],
        book: RuleBook,
        modules: Sequence[str],
    ) -> Meeting:
        """How much rows of a model meet, as two tapes of it tell: one has twice the rows of the other.

        Looked at once for two ranks: what more ranks would have to move, two have to. `counted`: whether a batch tensor has
        the rows of the batch; `key`: what it depends on; `modules`: those that strategies run on each rank's rows.
        """
        if key not in self._met:
            grid = MeshShape(("rows",), (2,))
            start = starting(more, {name: (0 if rows else "I",) for name, rows in counted.items()}, 1)
            prefixes = tuple(f"{module}." for module in modules) if alike(few, more) else ()
            found = follows(few, more, self._merged(more), grid, book, start, prefixes)
            if plain(found, few, more, grid):
                self._met[key] = "never"
            else:  # a write that is lost is no small matter
                slight = little(found, few, more, grid) and lost(found, more, start, grid) is None
                self._met[key] = "little" if slight else "much"
        return self._met[key]

    def of(
        self,
        key: object,
        own: Tape,
        whole: Callable[[], Tape],
        grid: MeshShape,
        book: RuleBook,
        states: Mapping[str, States],
        modules: Sequence[str],
    ) -> Tape:
        """The tape of one rank.

        Args:
            key: what it depends on.
            own: recorded with the rows of one rank; whole: with those of all, where it is not known yet.
            grid: the axes that divide rows.
            states: name of a batch tensor -> its states on the grid.
            modules: those that strategies run on each rank's rows.

        Raises:
            PlanError: the model writes to rows of other ranks through views, which would be views of copies.
        """
        if key not in self._divided:
            work = math.prod(grid.sizes) * sum(
                forward_flops(node, own.values, by_name(book.composites)) for node in own.nodes
            )
            if own.real and work > REAL_WORK:
                self._divided[key] = replace(own, origin=None, division=Division(notes=(MUCH,)))
            else:
                self._divided[key] = self._made(own, whole(), grid, book, states, modules)
        return self._divided[key]

    def _made(
        self,
        own: Tape,
        whole: Tape,
        grid: MeshShape,
        book: RuleBook,
        states: Mapping[str, States],
        modules: Sequence[str],
    ) -> Tape:
        prefixes = tuple(f"{module}." for module in modules)
        same = alike(own, whole)
        if not same and prefixes and any(f"{node.module}.".startswith(prefixes) for node in whole.nodes):
            return replace(own, origin=None, division=Division(notes=(UNLIKE,)))
        start = starting(whole, states, grid.ndim)
        found = follows(own, whole, self._merged(whole), grid, book, start, prefixes)
        if same and plain(found, own, whole, grid):
            return own
        view = lost(found, whole, start, grid)
        if view is not None:
            raise _refused(whole.nodes[view], grid)
        if same and (len(own.nodes) > SMALL and little(found, own, whole, grid)):
            return with_moves(own, whole, found, grid)
        known = own if same else None
        return Dividing(whole, known, own.rows, start, found, grid, by_name(book.composites)).tape()
