"""The tapes of a search: recorded where they must be, scaled where they can be.

What searches of one model have in common, whatever else they are asked for.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.propagate.prediction import MeshShape
from meshwright_dtensor.rules import RuleBook
from meshwright_planner.evaluation.context import Basis, Surveys
from meshwright_planner.placement.legal_rows import Rules
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import Quotient, quotient
from meshwright_planner.trace.recorder.record import NoRunError, RecordingCache, record
from meshwright_planner.trace.row_coupling import SMALL, DataRankTapes
from meshwright_planner.trace.scale_batch import TapeFamily
from meshwright_planner.trace.tape import Tape

Shapes = tuple[tuple[int, ...], ...]

LEARNT = (2, 4)
"""Rows of the two tapes that all others follow from.  Not 1: a dim of 1 is broadcast and is laid out as one likes."""


TOLD_BY = 8
"""Rows of a third one, which tells whether sizes that do not grow as the rows do are still on lines."""


class Tapes:
    """The tapes of one model by the shapes of a batch. A variant of a search shares them."""

    def __init__(self) -> None:
        self._tapes: dict[object, Tape] = {}
        self._about: dict[object, Tape | None] = {}
        self._families: dict[object, TapeFamily | None] = {}
        self._rows = DataRankTapes(self.quotient)
        self._quotients: dict[
            int, tuple[Tape, Quotient]
        ] = {}  # with the tape, whose number nobody else has then
        self._failed: dict[object, NoRunError] = {}
        self._known: dict[torch.dtype | None, RecordingCache] = defaultdict(RecordingCache)

    def of(
        self,
        basis: Basis,
        rules: Rules,
        degrees: Mapping[str, int],
        microbatches: int = 1,
        rough: bool = False,
    ) -> Tape:
        """The tape of what one rank computes at once: a microbatch of its part of the batch.

        `rough`: what makes no difference may be left out.

        Raises:
            PlanError: the model runs on its batch, and not on such a part of it.
            UsageError: it does not run.
        """
        batch, shapes = basis.setting.batch, _shapes(basis, degrees, microbatches)
        try:
            own = self._find(basis, rules, batch, shapes)
        except NoRunError as error:
            raise self._refusal(basis, rules, degrees, microbatches, error) from error
        axes = basis.rows_axes(degrees)
        if not axes or not isinstance(rules, RuleBook):
            return own
        counted = {name: tuple(t.shape[:1]) == (batch.size,) for name, t in batch.tensors()}
        key = (basis.setting.dtype, *shapes.values())
        many, large = batch.size >= max(LEARNT), len(own.nodes) > SMALL
        if not many or self._family(basis, rules, batch, shapes) is None:
            if rough and large:  # each number of rows would have to be recorded
                return own
        else:  # of all numbers of rows at once
            few, more = (self._find(basis, rules, batch, one) for one in self._pair(batch, shapes))
            modules = tuple(basis.run_apart())
            pair = (basis.setting.dtype, *self._pair(batch, shapes)[0].values(), modules)
            met = self._rows.meet(pair, few, more, counted, rules, modules)
            if met == "never" or (met == "little" and rough and large):
                return own
        together = _shapes(basis, {a: 1 if a in axes else d for a, d in degrees.items()}, microbatches)
        grid = MeshShape(axes, tuple(degrees[a] for a in axes))
        lying = {
            name: tuple(basis.batch_states(name, tuple(t.shape), degrees)[a] for a in axes)
            for name, t in batch.tensors()
        }
        return self._rows.of(
            (key, grid.axes, grid.sizes, *together.values()),
            own,
            lambda: self._find(basis, rules, batch, together),
            grid,
            rules,
            lying,
            basis.run_apart(),
        )

    def quotient(self, tape: Tape) -> Quotient:
        """The quotient of a tape, and of all that differ from it in sizes only, made once."""
        like = tape if tape.origin is None else tape.origin
        if id(like) not in self._quotients:
            self._quotients[id(like)] = like, quotient(like)
        return self._quotients[id(like)][1]

    def about(
        self, basis: Basis, rules: Rules, degrees: Mapping[str, int], microbatches: int = 1
    ) -> Tape | None:
        """Where that would have to be recorded, what tapes of more rows say of it; None where it is known or they say nothing.

        A model may do less for a single row than for one of several: this has its sizes, and no fewer nodes.
        """
        shapes = _shapes(basis, degrees, microbatches)
        key = (basis.setting.dtype, *shapes.values())
        if key in self._tapes:
            return None
        if key not in self._about:
            self._about[key] = self._scaled(basis, rules, basis.setting.batch, shapes, one_too=True)
        return self._about[key]

    def other(
        self, basis: Basis, rules: Rules, degrees: Mapping[str, int], microbatches: int = 1
    ) -> Tape | None:
        """The tape of the same work on another number of rows; None where the batch has but one, or it cannot be recorded."""
        tape, batch = self.of(basis, rules, degrees, microbatches), basis.setting.batch
        if tape.origin is not None and tape.origin.rows != tape.rows:
            return tape.origin
        shapes = _shapes(basis, degrees, microbatches)
        for rows, shaped in zip(LEARNT, self._pair(batch, shapes), strict=True):
            if tape.rows != rows <= batch.size:
                with contextlib.suppress(UsageError):
                    return self._find(basis, rules, batch, shaped)
        return None

    def _find(self, basis: Basis, rules: Rules, batch: Batch, shapes: dict[str, tuple[int, ...]]) -> Tape:
        key = (basis.setting.dtype, *shapes.values())  # shared by variants in other precisions
        if key not in self._tapes:
            self._tapes[key] = self._scaled(basis, rules, batch, shapes) or self._run(
                basis, rules, batch, shapes
            )
            pair = self._pair(batch, shapes)
            if all((basis.setting.dtype, *one.values()) in self._tapes for one in pair):
                self._family(basis, rules, batch, shapes)  # what is merged in one is merged in the other
        return self._tapes[key]

    def _run(self, basis: Basis, rules: Rules, batch: Batch, shapes: dict[str, tuple[int, ...]]) -> Tape:
        """Recorded; where a model cannot run on one row, what more rows say of one: norms of the batch see all ranks' rows."""
        try:
            return self._recorded(basis, rules, batch, shapes)
        except UsageError:
            tape = self._scaled(basis, rules, batch, shapes, one_too=True)
            if tape is None:
                raise
            return tape

    def _refusal(
        self,
        basis: Basis,
        rules: Rules,
        degrees: Mapping[str, int],
        microbatches: int,
        error: NoRunError,
    ) -> UsageError:
        """What to say where a model does not run on a rank's part of its batch: the degree, or the microbatches, at fault."""
        whole = {name: tuple(t.shape) for name, t in basis.setting.batch.tensors()}
        for axis, degree in degrees.items():
            alone = _shapes(basis, {a: degree if a == axis else 1 for a in degrees}, 1)
            if degree > 1 and alone != whole and self._fails(basis, rules, alone):
                return _in_parts(f"degrees.{axis}", degree, error, alone)
        parts = _shapes(basis, degrees, microbatches)
        if parts == whole or self._fails(basis, rules, whole):
            return error
        if microbatches > 1 and not self._fails(basis, rules, _shapes(basis, degrees, 1)):
            return _in_parts("microbatches", microbatches, error, parts)
        axis = next(
            a
            for a, d in degrees.items()
            if d > 1 and _shapes(basis, {**degrees, a: 1}, microbatches) != parts
        )
        return _in_parts(f"degrees.{axis}", degrees[axis], error, parts)

    def _fails(self, basis: Basis, rules: Rules, shapes: dict[str, tuple[int, ...]]) -> bool:
        try:
            self._find(basis, rules, basis.setting.batch, shapes)
        except NoRunError:
            return True
        return False

    def _recorded(self, basis: Basis, rules: Rules, batch: Batch, shapes: dict[str, tuple[int, ...]]) -> Tape:
        dtype = basis.setting.dtype
        key = (dtype, *shapes.values())
        if key in self._failed:
            raise self._failed[key]
        local = batch.map(lambda name, t: _part(t, shapes[name]))
        try:
            return record(basis.setting.model, local, rules.composites, dtype, self._known[dtype])
        except NoRunError as error:
            self._failed[key] = error
            raise

    def _scaled(
        self,
        basis: Basis,
        rules: Rules,
        batch: Batch,
        shapes: dict[str, tuple[int, ...]],
        one_too: bool = False,
    ) -> Tape | None:
        """The tape by scaling two others, where it has more rows than they; `one_too`: or a single one."""
        size, whole = batch.size, {name: tuple(t.shape) for name, t in batch.tensors()}
        counted = [name for name, shape in whole.items() if shape[:1] == (size,)]
        rows = {shapes[name][0] for name in counted}
        if len(rows) != 1 or rows & {*LEARNT, *(() if one_too else (1,))}:
            return None
        if size < max(LEARNT):
            return None
        family = self._family(basis, rules, batch, shapes)
        return None if family is None else family.at(rows.pop())

    def _family(
        self, basis: Basis, rules: Rules, batch: Batch, shapes: dict[str, tuple[int, ...]]
    ) -> TapeFamily | None:
        """Of the tapes that have these shapes but for the rows; None where sizes are no straight lines in the rows."""
        few, more = self._pair(batch, shapes)
        key = (basis.setting.dtype, *few.values())
        if key not in self._families:
            tapes = []
            with contextlib.suppress(UsageError):  # it takes no so few rows
                tapes = [self._find(basis, rules, batch, one) for one in (few, more)]
        if key not in self._families:  # the second of them may have made it
            self._families[key] = None
            # what was run on real data is what it is
            if not any(tape.real for tape in tapes) and [tape.rows for tape in tapes] == list(LEARNT):
                with contextlib.suppress(ValueError):
                    family = TapeFamily(*tapes)
                    third = None if family.proportional else self._third(basis, rules, batch, shapes)
                    if family.proportional or (third is not None and family.predicts(third)):
                        self._families[key] = family
                        for other in filter(None, (tapes[1], third)):
                            other.origin = tapes[0]
        return self._families[key]

    def _third(
        self, basis: Basis, rules: Rules, batch: Batch, shapes: dict[str, tuple[int, ...]]
    ) -> Tape | None:
        """A third tape of a family, recorded; None where the batch has no more rows than the two, or it takes no fewer."""
        if batch.size <= max(LEARNT):
            return None
        with contextlib.suppress(UsageError):
            return self._find(basis, rules, batch, self._with_rows(batch, shapes, min(batch.size, TOLD_BY)))
        return None

    def _pair(self, batch: Batch, shapes: dict[str, tuple[int, ...]]) -> list[dict[str, tuple[int, ...]]]:
        """The shapes with the rows of the two tapes that others follow from."""
        return [self._with_rows(batch, shapes, rows) for rows in LEARNT]

    @staticmethod
    def _with_rows(batch: Batch, shapes: dict[str, tuple[int, ...]], rows: int) -> dict[str, tuple[int, ...]]:
        whole = {name: t.shape[0] if t.dim() else None for name, t in batch.tensors()}
        return {
            name: (rows, *shape[1:]) if whole[name] == batch.size else shape for name, shape in shapes.items()
        }


def _in_parts(field: str, value: int, error: NoRunError, shapes: Mapping[str, tuple[int, ...]]) -> PlanError:
    shown = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
    rule = f"the model has to run on a rank's part of the batch, and {error.what} on {shown}"
    return PlanError(field, value, rule, "1")


def _part(tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    for dim, size in enumerate(shape):
        tensor = tensor.narrow(dim, 0, size)
    return tensor.contiguous()  # as a rank holds it: models call view on their inputs


def _shapes(basis: Basis, degrees: Mapping[str, int], microbatches: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a batch's tensors as one rank has them, of one of its microbatches."""
    return {
        name: basis.local_shape(name, tuple(t.shape), degrees, microbatches)
        for name, t in basis.setting.batch.tensors()
    }


@dataclass
class Shared:
    """What was recorded and solved once serves every variant of a search: more ranks, fewer rows, another optimizer.

    Args:
        surveys: what strategies find in the model.
        tapes: by the shapes of a batch.
        problems: by links, tape, searched axes with their degrees, whether there is a mesh to pay for, and the axes that place
            parameters themselves; without the links and those axes, the first of them.
        placements: by problem and optimizer.
        models: by all but the sizes: a problem, and a placement that others start from.
        rules: request for recomputation -> its rules.
        blocks: patterns of the blocks that repeat, None before they are asked for.
        named: names of those blocks, None before they are asked for.
        tape: one of the tapes, for what is the same in all of them; None before it is asked for.
        end: when the time of the search is over (time.monotonic), None before it has begun.
    """

    surveys: Surveys
    tapes: Tapes = field(default_factory=Tapes)
    problems: dict[tuple[object, ...], PlacementProblem] = field(default_factory=dict)
    placements: dict[tuple[object, ...], Placement] = field(default_factory=dict)
    models: dict[tuple[object, ...], tuple[PlacementProblem, Placement]] = field(default_factory=dict)
    rules: dict[str, tuple[RecomputeRule, ...]] = field(default_factory=dict)
    blocks: tuple[str, ...] | None = None
    named: tuple[str, ...] | None = None
    tape: Tape | None = None
    end: float | None = None
