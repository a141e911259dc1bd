"""The tapes of a search, recorded for a few batch sizes and scaled to all others, and the cache that all its variants share."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.propagate.choose import MeshShape
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.utils.memo import Memo
from meshwright_planner.evaluation.context import Basis, Degrees, Surveys
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.quotient import Quotient, quotient
from meshwright_planner.trace.recorder.record import NoRunError, RecordingCache, record
from meshwright_planner.trace.row_coupling import SMALL, DataRankTapes
from meshwright_planner.trace.scale_batch import TapeFamily
from meshwright_planner.trace.tape import Tape

Shapes = dict[str, tuple[int, ...]]
"""Batch tensor -> shape on one rank."""

BASE_ROWS = (2, 4)
"""Rows of the two tapes that all others are scaled from. Not 1: a dim of size 1 may be broadcast, and its strides are arbitrary."""

CHECK_ROWS = 8
"""Rows of a third tape. It checks that sizes which are not proportional to the rows still grow linearly."""


class Tapes:
    """The tapes of one model, by the shapes of a batch. All variants of a search share them."""

    def __init__(self, rules: RuleBook) -> None:
        self._rules = rules
        self._tapes: dict[object, Tape] = {}
        self._memo = Memo()
        self._families: dict[object, TapeFamily | None] = {}
        self._data_ranks = DataRankTapes(self.quotient, rules)
        self._failed: dict[object, NoRunError] = {}
        self._known: dict[torch.dtype | None, RecordingCache] = defaultdict(RecordingCache)

    def of(self, basis: Basis, degrees: Degrees, microbatches: int = 1, rough: bool = False) -> Tape:
        """The tape of one microbatch of one rank's part of the batch.

        `rough`: an estimate may leave out collectives of interacting rows that hardly cost anything.

        Raises:
            PlanError: the model runs on its batch, but not on such a part of it.
            UsageError: the model does not run.
        """
        batch, shapes = basis.setting.batch, _shapes(basis, degrees, microbatches)
        try:
            local = self._find(basis, shapes)
        except NoRunError as error:
            raise self._refusal(basis, degrees, microbatches, error) from error
        axes = basis.rows_axes(degrees)
        if not axes:
            return local
        counted = {name: tuple(t.shape[:1]) == (batch.size,) for name, t in batch.tensors()}
        many, large = batch.size >= max(BASE_ROWS), len(local.nodes) > SMALL
        modules = basis.strategy_modules()
        if not many or self._family(basis, shapes) is None:
            if rough and large:
                # each number of rows would have to be recorded
                return local
        else:
            # one check serves all numbers of rows
            shapes_of_pair = _pair(basis, shapes)
            few, more = (self._find(basis, s) for s in shapes_of_pair)
            pair = (basis.setting.dtype, *shapes_of_pair[0].values(), modules)
            coupling = self._data_ranks.meet(pair, few, more, counted, modules)
            if coupling == "never" or (coupling == "little" and rough and large):
                return local
        together = _shapes(basis, {a: 1 if a in axes else d for a, d in degrees.items()}, microbatches)
        grid = MeshShape(axes, tuple(degrees[a] for a in axes))
        by_name = {name: basis.batch_states(name, tuple(t.shape), degrees) for name, t in batch.tensors()}
        states = {name: tuple(on_axis[a] for a in axes) for name, on_axis in by_name.items()}
        key = ((basis.setting.dtype, *shapes.values()), grid.axes, grid.sizes, *together.values())
        return self._data_ranks.of(key, local, lambda: self._find(basis, together), grid, states, modules)

    def quotient(self, tape: Tape) -> Quotient:
        """The quotient of a tape. Tapes that differ in sizes only share one."""
        origin = tape if tape.origin is None else tape.origin
        # the tape is kept too, so that its id stays unique
        return self._memo.once(id(origin), lambda: (origin, quotient(origin)))[1]

    def for_more_rows(self, basis: Basis, degrees: Degrees, microbatches: int = 1) -> Tape | None:
        """A tape of one row, scaled from tapes of more rows, while it is not recorded; else None.

        A model may do less for a single row than for one of several, so this tape has the right sizes and no fewer nodes.
        """
        shapes = _shapes(basis, degrees, microbatches)
        key = (basis.setting.dtype, *shapes.values())
        if key in self._tapes:
            return None
        return self._memo.once(key, lambda: self._scaled(basis, shapes, single_row=True))

    def other(self, basis: Basis, degrees: Degrees, microbatches: int = 1) -> Tape | None:
        """The tape of the same work on another number of rows; None where the batch has one row or recording fails."""
        tape, batch = self.of(basis, degrees, microbatches), basis.setting.batch
        if tape.origin is not None and tape.origin.rows != tape.rows:
            return tape.origin
        shapes = _shapes(basis, degrees, microbatches)
        for rows, pair_shapes in zip(BASE_ROWS, _pair(basis, shapes), strict=True):
            if tape.rows != rows <= batch.size:
                with contextlib.suppress(UsageError):
                    return self._find(basis, pair_shapes)
        return None

    def _find(self, basis: Basis, shapes: Shapes) -> Tape:
        # variants of a search differ in precision
        key = (basis.setting.dtype, *shapes.values())
        if key not in self._tapes:
            self._tapes[key] = self._scaled(basis, shapes) or self._run(basis, shapes)
            pair = _pair(basis, shapes)
            if all((basis.setting.dtype, *s.values()) in self._tapes for s in pair):
                # both tapes then share one quotient
                self._family(basis, shapes)
        return self._tapes[key]

    def _run(self, basis: Basis, shapes: Shapes) -> Tape:
        """Record a tape. A model that refuses one row (a batch norm) gets a scaled tape: on real ranks its norm sees all rows."""
        dtype = basis.setting.dtype
        key = (dtype, *shapes.values())
        try:
            if key in self._failed:
                raise self._failed[key]
            local = basis.setting.batch.map(lambda name, t: _part(t, shapes[name]))
            return record(basis.setting.model, local, self._rules.composites, dtype, self._known[dtype])
        except UsageError as error:
            if isinstance(error, NoRunError):
                self._failed[key] = error
            tape = self._scaled(basis, shapes, single_row=True)
            if tape is None:
                raise
            return tape

    def _refusal(self, basis: Basis, degrees: Degrees, microbatches: int, error: NoRunError) -> UsageError:
        """The error where the model does not run on a rank's part of the batch. It names the degree or the microbatches."""
        whole = {name: tuple(t.shape) for name, t in basis.setting.batch.tensors()}
        for axis, degree in degrees.items():
            part = _shapes(basis, {a: degree if a == axis else 1 for a in degrees}, 1)
            if degree > 1 and part != whole and self._fails(basis, part):
                return _part_error(f"degrees.{axis}", degree, error, part)
        parts = _shapes(basis, degrees, microbatches)
        if parts == whole or self._fails(basis, whole):
            return error
        if microbatches > 1 and not self._fails(basis, _shapes(basis, degrees, 1)):
            return _part_error("microbatches", microbatches, error, parts)
        several = (axis for axis, degree in degrees.items() if degree > 1)
        axis = next(a for a in several if _shapes(basis, {**degrees, a: 1}, microbatches) != parts)
        return _part_error(f"degrees.{axis}", degrees[axis], error, parts)

    def _fails(self, basis: Basis, shapes: Shapes) -> bool:
        try:
            self._find(basis, shapes)
        except NoRunError:
            return True
        return False

    def _scaled(self, basis: Basis, shapes: Shapes, single_row: bool = False) -> Tape | None:
        """The tape scaled from two others, where it has more rows than they; `single_row`: or one row."""
        batch = basis.setting.batch
        rows = {shapes[name][0] for name, t in batch.tensors() if tuple(t.shape[:1]) == (batch.size,)}
        unscaled = {*BASE_ROWS, *(() if single_row else (1,))}
        if len(rows) != 1 or rows & unscaled or batch.size < max(BASE_ROWS):
            return None
        family = self._family(basis, shapes)
        return None if family is None else family.at(rows.pop())

    def _family(self, basis: Basis, shapes: Shapes) -> TapeFamily | None:
        """The tapes that differ from these shapes in rows only; None where sizes are not linear in the rows."""
        few, more = _pair(basis, shapes)
        rows = basis.setting.batch.size
        key = (basis.setting.dtype, *few.values())
        if key not in self._families:
            tapes = []
            # the model may refuse so few rows
            with contextlib.suppress(UsageError):
                tapes = [self._find(basis, s) for s in (few, more)]
        # recording the second tape may have made the family
        if key not in self._families:
            self._families[key] = None
            # a tape of a run on real data cannot be scaled
            if not any(tape.real for tape in tapes) and [tape.rows for tape in tapes] == list(BASE_ROWS):
                with contextlib.suppress(ValueError):
                    family = TapeFamily(*tapes)
                    third = None
                    # a batch of no more rows than the two has no third tape
                    if not family.proportional and rows > max(BASE_ROWS):
                        with contextlib.suppress(UsageError):
                            third = self._find(basis, _with_rows(basis, shapes, min(rows, CHECK_ROWS)))
                    if family.proportional or (third is not None and family.predicts(third)):
                        self._families[key] = family
                        for other in filter(None, (tapes[1], third)):
                            other.origin = tapes[0]
        return self._families[key]


@dataclass
class SearchCache:
    """Recorded and solved once for every variant of a search: more ranks, fewer rows, another optimizer.

    Args:
        surveys: what strategies find in the model.
        tapes: by the shapes of a batch.
        problems: by links, tape, searched axes with their degrees, whether a mesh adds dispatch time, and the axes whose
            strategies place parameters themselves. The first problem is also stored without the links and those axes.
        models: by everything except sizes: a problem and its placement, from which others are scaled.
        memo: the end of the search, facts of the model, and placements by problem and optimizer.
    """

    surveys: Surveys
    tapes: Tapes
    problems: dict[tuple[object, ...], PlacementProblem] = field(default_factory=dict)
    models: dict[tuple[object, ...], tuple[PlacementProblem, Placement]] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)


def _pair(basis: Basis, shapes: Shapes) -> list[Shapes]:
    """The shapes with the rows of the two tapes that others are scaled from."""
    return [_with_rows(basis, shapes, rows) for rows in BASE_ROWS]


def _with_rows(basis: Basis, shapes: Shapes, rows: int) -> Shapes:
    batch = basis.setting.batch
    counted = {name for name, t in batch.tensors() if tuple(t.shape[:1]) == (batch.size,)}
    return {name: (rows, *shape[1:]) if name in counted else shape for name, shape in shapes.items()}


def _part_error(field: str, value: int, error: NoRunError, shapes: Shapes) -> PlanError:
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    rule = f"the model must run on a rank's part of the batch, but {error.what} on {shown}"
    return PlanError(field, value, rule, "1")


def _part(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    # ranks hold contiguous inputs, and models call view() on them
    return tensor.contiguous()


def _shapes(basis: Basis, degrees: Degrees, microbatches: int) -> Shapes:
    """The shapes of the batch tensors on one rank, in one microbatch."""
    tensors = basis.setting.batch.tensors()
    return {name: basis.local_shape(name, tuple(t.shape), degrees, microbatches) for name, t in tensors}
