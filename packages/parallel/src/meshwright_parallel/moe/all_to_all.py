"""Uneven all-to-all of rows between the ranks of one mesh axis, with autograd."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import CommLog, record
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

Tensor = torch.Tensor
Counts = tuple[int, ...]


@dataclass(frozen=True)
class Route:
    """The all-to-alls of one module along one axis, whose names are for the communication log."""

    group: dist.ProcessGroup
    axis: str
    module: str

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.group.size()

    def counts(self, sent: Tensor) -> Tensor:
        """Integers [n, ...], row r for rank r; returns [n, ...], row r from rank r."""
        sent = sent.contiguous()
        received = torch.empty_like(sent)
        self.note(sent, "forward", "how many rows each expert gets")
        with waiting():
            dist.all_to_all_single(received.view(-1), sent.view(-1), group=self.group)
        return received

    def rows(self, tensor: Tensor, sent: Sequence[int], received: Sequence[int], why: str) -> Tensor:
        """Send rows [sum(sent), ...], sorted by target rank; returns [sum(received), ...], sorted by source rank."""
        return _Exchange.apply(tensor, self, tuple(sent), tuple(received), "forward", why)  # type: ignore[no-any-return]

    def note(self, tensor: Tensor, phase: str, why: str) -> None:
        """Log a collective that sends `tensor`."""
        if CommLog.listening():
            record("all_to_all", self.axis, tensor.nbytes * self.size, phase, self.module, "experts", why)


def as_global(tensor: Any, context: MeshContext) -> GlobalTensor:
    """The global tensor itself, or a plain tensor as a replicated one."""
    if isinstance(tensor, GlobalTensor):
        return tensor
    return distribute(tensor, context.mesh, context.replicated)


def sum_over_axes(counts: Tensor, context: MeshContext, axes: Iterable[int], module: str) -> Tensor:
    """Sum the rows per expert [E] of this rank over these axes.

    Ranks must agree on which experts of a container have a gradient, because the order of collectives depends on it.
    """
    for axis in axes:
        counts = counts.clone(memory_format=torch.contiguous_format)
        why = "which experts have rows"
        record("all_reduce", context.axes[axis], counts.nbytes, "forward", module, "experts", why)
        with waiting():
            dist.all_reduce(counts, group=context.group(axis))
    return counts


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: Tensor, route: Route, sent: Counts, received: Counts, phase: str, why: str
    ) -> Tensor:
        ctx.way = (route, received, sent, why)
        tensor = tensor.contiguous()
        result = tensor.new_empty((sum(received), *tensor.shape[1:]))
        route.note(tensor, phase, why)
        with waiting():
            dist.all_to_all_single(result, tensor, list(received), list(sent), group=route.group)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        route, sent, received, why = ctx.way
        moved = _Exchange.apply(gradient, route, sent, received, "backward", f"gradient of {why}")
        return moved, None, None, None, None, None


class _Tie(torch.autograd.Function):
    """Identity on the first tensor; the others get zeros as gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, *tied: Tensor) -> Tensor:
        ctx.shapes = [(t.shape, t.dtype, t.device) for t in tied]
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        zeros = (
            torch.zeros(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.shapes, ctx.needs_input_grad[1:], strict=True)
        )
        return (gradient, *zeros)


def tied(tensor: Tensor, *others: Tensor) -> Tensor:
    """`tensor`, whose backward pass also gives each of `others` a zero gradient."""
    return _Tie.apply(tensor, *others)  # type: ignore[no-any-return]
