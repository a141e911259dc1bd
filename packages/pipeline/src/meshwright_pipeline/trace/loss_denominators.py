"""Numbers that the whole batch decides, in the losses of its microbatches: targets that count, sums of masks.

A loss that averages over targets (cross entropy with ignored labels) is a sum over targets divided by how many count; one made
by hand is divided by the sum of a mask. Before a step, the rank of the last stage runs its microbatches with every unit skipped,
and takes down what inputs alone decide. In the step, each microbatch is given the numbers of the whole batch.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

Tensor = torch.Tensor
Site = tuple[str, str, int]
"""A line of code that calls a function of torch: (function, file, line)."""
Place = tuple[Site, int]
"""Which time in one forward a line calls it."""
SUMS: Mapping[Any, int] = MappingProxyType(
    {torch.sum: 1, torch.Tensor.sum: 1, torch.mean: 0, torch.Tensor.mean: 0}
)
"""Functions that may be asked for a number which inputs alone decide: 1 where that of the batch is the sum of microbatches', 0
where it is their mean."""
_OF_TORCH = os.path.dirname(torch.__file__)
_SIGNATURES = {
    F.cross_entropy: (
        "input target weight size_average ignore_index reduce reduction label_smoothing".split()
    ),
    F.nll_loss: "input target weight size_average ignore_index reduce reduction".split(),
}


def mean_over_targets(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """By name, the arguments of a call that averages over targets that are class numbers; None of any other."""
    names = _SIGNATURES.get(func)
    if names is None:
        return None
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given.get("target")
    if given.get("reduction", "mean") != "mean" or not {given.get("reduce"), given.get("size_average")} <= {
        None,
        True,
    }:
        return None
    if not isinstance(target, Tensor) or target.is_floating_point():
        return None
    return given


def _count(given: dict[str, Any]) -> float:
    target, ignored = given["target"], given.get("ignore_index", -100)
    counts = target != ignored
    weight = given.get("weight")
    number: Tensor
    if weight is None:
        number = counts.sum()
    else:
        number = (weight[torch.where(counts, target, torch.zeros_like(target))] * counts).sum()
    return float(_whole(number).item())


def site_of(func: Any, frame: FrameType | None) -> Site:
    """The line outside of torch that a call comes from."""
    while frame is not None and frame.f_code.co_filename.startswith(_OF_TORCH):
        frame = frame.f_back
    name = getattr(func, "__name__", str(func))
    return (name, "", 0) if frame is None else (name, frame.f_code.co_filename, frame.f_lineno)


class GlueMode(TorchFunctionMode):
    """Sees the functions of torch that code between units calls, and none of those that units call."""

    def __init__(self) -> None:
        super().__init__()
        self._paused = 0
        self._sites: Counter[Site] = Counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, a unit runs."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._paused:
            return func(*args, **kwargs)
        return self.call(func, args, kwargs)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a function."""
        return func(*args, **kwargs)

    def place(self, func: Any, frame: FrameType | None) -> Place | None:
        """Where a sum or a mean is asked for; None of any other function."""
        if func not in SUMS:
            return None
        site = site_of(func, frame)
        self._sites[site] += 1
        return site, self._sites[site] - 1


@dataclass(frozen=True)
class Denominators:
    """What inputs alone decide of one microbatch, or of the batch.

    Attributes:
        counts: per call of a loss that averages over targets, how much those count.
        sums: where a number is asked for -> it, and whether it adds up (1) or is a mean (0).
    """

    counts: tuple[float, ...]
    sums: Mapping[Place, tuple[Tensor, int]]


class DenominatorCounter(GlueMode):
    """Takes down the numbers of one microbatch; losses that average are not computed.

    Args:
        wanted: where numbers that inputs alone decide are asked for.
    """

    def __init__(self, wanted: Collection[Place]) -> None:
        super().__init__()
        self.wanted = frozenset(wanted)
        self.counts: list[float] = []
        self.sums: dict[Place, tuple[Tensor, int]] = {}

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See Glue."""
        given = mean_over_targets(func, args, kwargs)
        if given is not None:
            self.counts.append(_count(given))
            scores = given["input"]
            return torch.zeros((), dtype=scores.dtype, device=scores.device)
        place = self.place(func, sys._getframe(2))
        result = func(*args, **kwargs)
        if place in self.wanted:
            assert place is not None
            self.sums[place] = (_whole(result), SUMS[func])
        return result


class BatchDenominatorMode(GlueMode):
    """Inside, one microbatch is given numbers of the whole batch.

    Args:
        numbers: them; counts are a microbatch's part of those of the batch.
    """

    def __init__(self, numbers: Denominators) -> None:
        super().__init__()
        self.sums = numbers.sums
        self._counts = list(numbers.counts)

    def call(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """See Glue."""
        given = mean_over_targets(func, args, kwargs)
        if given is not None and self._counts:
            given.pop("size_average", None)
            given.pop("reduce", None)
            return func(**{**given, "reduction": "sum"}) / self._counts.pop(0)
        place = self.place(func, sys._getframe(2))
        known = None if place is None else self.sums.get(place)
        return func(*args, **kwargs) if known is None else known[0].clone()


def sum_denominators(
    parts: Sequence[Denominators], averaging: int, wanted: Collection[Place]
) -> Denominators:
    """The numbers that microbatches are given, of those that were taken down in each.

    Args:
        averaging, wanted: losses that average over targets, and places where numbers are asked for, in a watched run.

    Raises:
        UnsupportedError: code between units has asked for others.
    """
    for part in parts:
        if len(part.counts) != averaging or set(part.sums) != set(wanted):
            raise UnsupportedError(
                "the code of the model that computes the loss does something else than when it was profiled with a batch of the "
                "same shapes; set pipeline.microbatches to 1, or compute the loss outside of the model"
            )
    counts = [sum(column) / len(parts) for column in zip(*(part.counts for part in parts), strict=True)]
    sums: dict[Place, tuple[Tensor, int]] = {}
    for place in wanted:
        every = [part.sums[place][0] for part in parts]
        total, adds = torch.stack(every).sum(0), parts[0].sums[place][1]
        sums[place] = ((total if adds else total / len(parts)).to(every[0].dtype), adds)
    return Denominators(tuple(counts), sums)


def _whole(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, GlobalTensor) else value
