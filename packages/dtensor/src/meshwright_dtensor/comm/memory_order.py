"""Conversions of local tensors whose dims are in another order in memory (channels_last, say), without copies to and fro.

Ranks exchange memory, so all have to hold their parts in one order. Two things make sure of it. A local tensor tells the order
only where all ranks have parts of the same shape and no dim is shorter than 2. And ranks compare their orders when a place of
the program converts for the first time; where they differ, parts are sent in the order of the dims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from meshwright_dtensor.comm.collectives import Step
from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of, local_shape_of, uneven_dims
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import States

Tensor = torch.Tensor
Functions = Sequence[Callable[[Tensor, Site], Tensor]]
Order = tuple[int, ...]

FEWEST_DIMS = 4
"""Dims from which memory orders are compared: images, volumes, heads of attention. Each comparison is a small collective."""


class OrderedSteps:
    """The steps of a conversion for tensors in other memory orders than that of their dims, in one direction.

    ``phase``: "forward" or "backward".
    """

    __slots__ = ("context", "phase", "_steps", "_axes", "_by_site", "_made")

    def __init__(self, context: MeshContext, steps: Sequence[Step], phase: str) -> None:
        self.context, self.phase, self._steps = context, phase, steps
        self._axes = sorted({step.axis for step in steps if step.collective is not None})
        self._by_site: dict[Site, Order | None] = {}
        self._made: dict[Order, Functions] = {}

    def of(self, t: Tensor, site: Site) -> Functions | None:
        """The steps that keep the memory order of ``t``; None where they are those of a contiguous tensor.

        The first call for a site is a collective.
        """
        if site not in self._by_site:
            self._by_site[site] = self._common(_order_of(t), t.device)
        agreed = self._by_site[site]
        if agreed is None or t.stride() != dense_strides(tuple(t.shape), agreed):
            return None
        if agreed not in self._made:
            made = (step.function(self.phase, agreed) for step in self._steps)
            self._made[agreed] = [function for function in made if function is not None]
        return self._made[agreed]

    def _common(self, order: Order | None, device: torch.device) -> Order | None:
        """The order, if all ranks have it."""
        code = 0 if order is None else 1 + sum(dim * len(order) ** at for at, dim in enumerate(order))
        largest_and_least = torch.tensor([code, -code], device=device)
        for axis in self._axes:
            with waiting():
                dist.all_reduce(largest_and_least, dist.ReduceOp.MAX, group=self.context.group(axis))
        largest, least = largest_and_least.tolist()
        return order if largest == -least else None


def ordered_steps(
    context: MeshContext, held: States, shape: Sequence[int], steps: Sequence[Step], phase: str
) -> OrderedSteps | None:
    """Steps for tensors in ``held`` states; None where a local tensor does not tell the order, or nothing is exchanged."""
    states = [state for step in steps for state in (step.source, step.target)]
    if len(shape) < FEWEST_DIMS or any(isinstance(state, IntervalShard) for state in (*held, *states)):
        return None
    if all(step.collective is None for step in steps) or uneven_dims(shape, context.sizes, held):
        return None
    if min(local_shape_of(shape, context.sizes, context.coords, held)) < 2:
        return None
    return OrderedSteps(context, steps, phase)


def _order_of(t: Tensor) -> Order | None:
    """The order of the dims in memory; None if it is their own, or the tensor is not dense."""
    if t.is_contiguous():
        return None
    order = dim_order_of(t)
    return order if t.stride() == dense_strides(tuple(t.shape), order) else None
