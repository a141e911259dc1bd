"""Whether a gradient that autograd passes to a backward function is held by nobody else, so that it may be overwritten."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch

from meshwright_dtensor._torch.core import bind_apply
from meshwright_dtensor._torch.modes import without_modes

References = tuple[int, int, int, int, bool]


def references(t: torch.Tensor) -> References:
    """How often Python and C++ refer to a tensor and to its storage, counted in the function that asks.

    The last entry: the memory is torch's own, and not that of an array, say, whose owner is not counted.
    """
    storage = t.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return sys.getrefcount(t), t._use_count(), sys.getrefcount(storage), count, storage.resizable()  # type: ignore[attr-defined]


class _Probe(torch.autograd.Function):
    """Counts the references to a gradient that only autograd holds."""

    @staticmethod
    def forward(ctx: Any, t: torch.Tensor, counts: list[References]) -> torch.Tensor:
        ctx.counts = counts
        return t.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        ctx.counts.append(references(grad))
        return None, None


@cache
def references_of_unshared() -> References:
    """The `references` of a gradient that only autograd holds, in a backward function: versions of Python and torch differ."""
    counts: list[References] = []
    with without_modes(), torch.inference_mode(False), torch.enable_grad():
        # the product makes a new gradient
        (bind_apply(_Probe)(torch.zeros(1, device="cpu", requires_grad=True), counts) * 2).sum().backward()
    return counts[0]
