"""Batch-wide denominators of losses: number of targets that are not ignored, sum of a mask.

Cross entropy with ignored labels is a sum over targets divided by the number of targets that count. Other losses are
divided by the sum of a mask. Before a step, the rank of the last stage runs its microbatches with all units skipped, and
records the numbers that only inputs determine. In the step, each microbatch uses the numbers of the whole batch.

Where the targets were all elements of an input as they are, the next steps count these elements, without running anything. The
step itself then counts again, and fails where the loss had other targets.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.api import from_local
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.users_line import is_ours
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import function_mode, pop_function_mode, push_function_mode
from meshwright_pipeline.pytrees import full_value, version_of

Tensor = torch.Tensor
Site = tuple[str, str, int]
"""A line of code that calls a torch function: (function, file, line)."""
Place = tuple[Site, int]
"""(site, index of the call from this line in one forward)."""
SUMS: Mapping[Any, int] = MappingProxyType({torch.sum: 1, Tensor.sum: 1, torch.mean: 0, Tensor.mean: 0})
"""Functions that may compute a number which only inputs determine: 1 if that of the batch is the sum over microbatches, 0
if it is their mean."""
_OTHER_LOSS = (
    "the code that computes the loss runs other operations than when the model was profiled with a batch of the same shapes. Set "
    "pipeline.microbatches to 1, or compute the loss outside of the model"
)
_OF_TORCH = os.path.dirname(torch.__file__)
_OF_NLL_LOSS = "input target weight size_average ignore_index reduce reduction".split()
_SIGNATURES = {F.nll_loss: _OF_NLL_LOSS, F.cross_entropy: [*_OF_NLL_LOSS, "label_smoothing"]}
_WATCHED = frozenset({*_SIGNATURES, *SUMS})
"""Functions whose results may need numbers of the whole batch."""


def mean_over_targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The arguments, by name, of a call that averages over targets that are class indices; None for other calls."""
    names = _SIGNATURES.get(func)
    if names is None:
        return None
    arguments = dict(zip(names, args, strict=False)) | kwargs
    target = arguments.get("target")
    legacy = {arguments.get("reduce"), arguments.get("size_average")}
    averages = arguments.get("reduction", "mean") == "mean" and legacy <= {None, True}
    return arguments if averages and isinstance(target, Tensor) and not target.is_floating_point() else None


def _count(arguments: dict[str, Any]) -> Tensor:
    target, ignored = arguments["target"], arguments.get("ignore_index", -100)
    counts, weight = target != ignored, arguments.get("weight")
    if weight is not None:
        counts = weight[torch.where(counts, target, torch.zeros_like(target))] * counts
    return counts.sum()


class GlueMode(TorchFunctionMode):
    """Intercepts torch functions that code between units calls, not those that units call.

    `watched`: the functions that `call` runs; None for all.
    """

    watched: ClassVar[frozenset[Any] | None] = None

    # what a unit computes may be one compiled call
    over_compiled_regions = True

    def __init__(self) -> None:
        super().__init__()
        # units that run, one in the other
        self.units = 0
        self._sites: Counter[Site] = Counter()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Inside, a unit runs."""
        return _Paused(self)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.units or (self.watched is not None and func not in self.watched):
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function."""
        return func(*args, **kwargs)

    def place(self, func: Any, frame: FrameType | None) -> Place | None:
        """The place of a call of a sum or mean, the line of the model that makes it; None for other functions."""
        if func not in SUMS:
            return None
        # methods of global tensors are ours, those of plain ones torch's
        while frame is not None and (frame.f_code.co_filename.startswith(_OF_TORCH) or is_ours(frame)):
            frame = frame.f_back
        name = getattr(func, "__name__", str(func))
        site = (name, "", 0) if frame is None else (name, frame.f_code.co_filename, frame.f_lineno)
        self._sites[site] += 1
        return site, self._sites[site] - 1


class _Paused:
    """See `GlueMode.paused`. Around every unit: a generator would cost more than the mode."""

    __slots__ = ("mode", "off")

    def __init__(self, mode: GlueMode) -> None:
        self.mode, self.off = mode, False

    def __enter__(self) -> None:
        self.mode.units += 1
        # every function that a unit calls would cost a call of this mode
        self.off = pop_function_mode(self.mode)

    def __exit__(self, *error: object) -> None:
        if self.off:
            push_function_mode(self.mode)
        self.mode.units -= 1


@dataclass(frozen=True)
class PlainTargets:
    """Targets that are all elements of an input: leaf number `leaf` of the arguments. `ignored`: those that do not count."""

    leaf: int
    ignored: int

    @staticmethod
    def of(
        arguments: dict[str, Any], leaves: Sequence[Any], versions: Sequence[int | None]
    ) -> PlainTargets | None:
        """The targets of a call that averages; None where they are of no input. `versions`: of the leaves before the forward."""
        target, weight = arguments["target"], arguments.get("weight")
        if weight is not None or type(target) is not Tensor or not target.is_contiguous():
            return None
        places = [
            place
            for place, leaf in enumerate(leaves)
            if type(leaf) is Tensor and leaf.dtype == target.dtype and leaf.numel() == target.numel()
            if leaf.is_contiguous() and leaf.data_ptr() == target.data_ptr()
        ]
        if len(places) != 1:
            # an input given twice may be two in the next step
            return None
        (place,) = places
        if versions[place] is None or version_of(leaves[place]) != versions[place]:
            return None
        return PlainTargets(place, int(arguments.get("ignore_index", -100)))


@dataclass(frozen=True)
class MicrobatchNumbers:
    """Numbers of one microbatch that only inputs determine; on several ranks their sums are still to be made.

    Attributes:
        counts: for each call of a loss that averages over targets, the (weighted) number of targets.
        sums: place of a call -> its result, and whether it is a sum (1) or a mean (0) over rows.
        plain: for each of these calls, where its targets are as the model was given them; None where they are nowhere.
        after: so many calls of units come before the first of these calls, in no function mode of the model; 0 for none.
    """

    counts: tuple[Tensor, ...]
    sums: Mapping[Place, tuple[Tensor, int]]
    plain: tuple[PlainTargets | None, ...] = ()
    after: int = 0

    @staticmethod
    def of_plain(leaves: Sequence[Any], plain: Sequence[PlainTargets]) -> MicrobatchNumbers:
        """Those of a microbatch with these leaves of its arguments."""
        counts = [_count({"target": leaves[at.leaf], "ignore_index": at.ignored}) for at in plain]
        return MicrobatchNumbers(tuple(counts), {})


@dataclass(frozen=True)
class Denominators:
    """Numbers that each microbatch takes of the batch: `counts` divided by the number of microbatches, and `sums`.

    `seen`: where `counts` are those of plain targets, the numbers that the calls of microbatches have had. `after`: so many calls
    of units come before the first call that takes one.
    """

    counts: tuple[float, ...]
    sums: Mapping[Place, Tensor]
    seen: tuple[list[Tensor], ...] = ()
    after: int = 0

    def check(self) -> None:
        """At the end of a step. Raises UnsupportedError: the losses had other targets than were counted."""
        for expected, column in zip(self.counts, self.seen, strict=False):
            given = float(_sum(column).item()) / len(column) if column else 0.0
            if given != expected:
                raise UnsupportedError(
                    f"the loss averages over {given:g} targets a microbatch, and in the steps before, with a batch of the same "
                    f"shapes, over those of an input that are not ignored, {expected:g} now: the code that computes it changes its "
                    "targets in some steps. Change them before the model is called, or set pipeline.microbatches to 1"
                )


class DenominatorCounter(GlueMode):
    """Records the numbers of one microbatch, at the `wanted` places. Losses that average are not computed."""

    watched = _WATCHED

    def __init__(self, wanted: Collection[Place], leaves: Sequence[Any] = ()) -> None:
        """`leaves`: of the arguments of the forward."""
        super().__init__()
        self.wanted, self.leaves = frozenset(wanted), leaves
        self.versions = [version_of(leaf) for leaf in leaves]
        self.counts: list[Tensor] = []
        self.plain: list[PlainTargets | None] = []
        self.begun = 0
        self._after: int | None = None
        self._innermost = True
        self.sums: dict[Place, tuple[Tensor, int]] = {}

    def unit(self) -> None:
        """A call of a unit begins."""
        self.begun += 1
        if self._after is None:
            self._innermost = function_mode() is self

    @property
    def after(self) -> int:
        """See MicrobatchNumbers."""
        # by their places, sums are told apart from the first one on
        return 0 if self.wanted or self._after is None or not self._innermost else self._after

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = mean_over_targets(func, args, kwargs)
        if arguments is not None:
            self._after = self.begun if self._after is None else self._after
            self.counts.append(_count(arguments))
            self.plain.append(PlainTargets.of(arguments, self.leaves, self.versions))
            scores = arguments["input"]
            return torch.zeros((), dtype=scores.dtype, device=scores.device)
        place = self.place(func, sys._getframe(2))
        result = func(*args, **kwargs)
        if place in self.wanted:
            assert place is not None
            # the code that follows may write to it
            self.sums[place] = (result.clone(), SUMS[func])
        return result


class BatchDenominatorMode(GlueMode):
    """Inside, a microbatch uses the numbers of the whole batch (see `sum_denominators`).

    Functions before the first call that takes one run as they are: every function costs a call of this mode.
    """

    watched = _WATCHED

    def __init__(self, denominators: Denominators) -> None:
        super().__init__()
        self.sums, self.seen = denominators.sums, iter(denominators.seen)
        self._counts = list(denominators.counts)
        self._counted = bool(self._counts)
        # calls of units after which it is on
        self._left = denominators.after
        self._late, self.on = bool(self._left), False
        self._outer: object = None

    def __enter__(self) -> BatchDenominatorMode:
        self._outer = function_mode()
        if not self._left:
            self._turn_on()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if self.on:
            super().__exit__(kind, *error)
        if kind is None and self._late and self._counts:
            raise UnsupportedError(_OTHER_LOSS)

    def unit_ended(self) -> None:
        """A call of a unit has ended."""
        self._left -= 1
        if not self._left:
            # entered inside of a mode of the model, it would end with that one
            if function_mode() is not self._outer:
                raise UnsupportedError(_OTHER_LOSS)
            self._turn_on()

    def _turn_on(self) -> None:
        self.on = True
        super().__enter__()

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        arguments = mean_over_targets(func, args, kwargs)
        if arguments is not None and self._counted and not self._counts:
            raise UnsupportedError(_OTHER_LOSS)
        if arguments is not None and self._counts:
            column = next(self.seen, None)
            if column is not None:
                column.append(_count(arguments))
            arguments.pop("size_average", None)
            arguments.pop("reduce", None)
            return func(**{**arguments, "reduction": "sum"}) / self._counts.pop(0)
        place = self.place(func, sys._getframe(2))
        total = None if place is None else self.sums.get(place)
        return func(*args, **kwargs) if total is None else total.clone()


def sum_denominators(
    parts: Sequence[MicrobatchNumbers], averaging: int, wanted: Sequence[Place]
) -> Denominators:
    """The numbers of the batch, from those recorded in its microbatches. Counts are divided by the number of microbatches.

    `averaging`, `wanted`: in the profiled run, the number of losses that average over targets, and the places of the numbers that
    only inputs determine.

    Raises UnsupportedError: the microbatches computed other numbers.
    """
    for part in parts:
        if len(part.counts) != averaging or set(part.sums) != set(wanted):
            raise UnsupportedError(_OTHER_LOSS)
    # summed on each rank first, so that ranks exchange each number once
    counts = [
        float(_sum(column).item()) / len(parts)
        for column in zip(*(part.counts for part in parts), strict=True)
    ]
    sums: dict[Place, Tensor] = {}
    for place in wanted:
        total, (value, adds) = _sum([part.sums[place][0] for part in parts]), parts[0].sums[place]
        sums[place] = (total if adds else total / len(parts)).to(value.dtype)
    return Denominators(tuple(counts), sums, after=min((part.after for part in parts), default=0))


def _sum(values: Sequence[Tensor]) -> Tensor:
    """The sum of values of all ranks, as an ordinary tensor; of half precision in float32."""
    first = values[0]
    # half precision would be rounded after each microbatch
    wide = torch.promote_types(first.dtype, torch.float32) if first.dtype.is_floating_point else None
    layout = first.global_layout if isinstance(first, GlobalTensor) else None
    if layout is None or any(
        not isinstance(v, GlobalTensor) or v.global_layout is not layout for v in values
    ):
        return torch.stack([full_value(value) for value in values]).sum(0, dtype=wide)
    parts = torch.stack([value.to_local() for value in values]).sum(0, dtype=wide)  # type: ignore[attr-defined]
    return from_local(parts, layout.mesh, layout.states, layout.shape).full_tensor()
