"""Tensor parallelism: weights and the work inside a layer are shared along the axis `tp`.

Which tensor dim of which value is sharded is the planner's to find (placement search) and the plan's to say; this
strategy only tells which degrees are worth searching.


A second tensor-parallel axis, `tp_outer`, outside of `tp`: the ranks of a row of the mesh that a slower link joins.

Where `tp` is as wide as a node, this one goes across nodes.  Placements on both are searched together, each with the costs of
its own link, so that the slow one carries little.  It is used where the user pins it (`degrees={"tp_outer": 2}`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from meshwright_dtensor.strategy.strategy import SearchRequest, Strategy, divisors


class Tensor(Strategy):
    """Placements on `tp` come from `plan.parameters` and `plan.activations`; the batch is replicated."""

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str] = "tp"
    order: ClassVar[int] = 40
    placement_search: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Every divisor of the world size: the search replicates what a degree does not divide."""
        return divisors(request.world_size)


class TensorOuter(Strategy):
    """Placements on `tp_outer` come from `plan.parameters` and `plan.activations`; the batch is replicated."""

    name: ClassVar[str] = "tensor-outer"
    axis: ClassVar[str] = "tp_outer"
    order: ClassVar[int] = 38
    placement_search: ClassVar[bool] = True
    optional: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """1, and where the axis is pinned every divisor of the world size."""
        return divisors(request.world_size) if self.axis in request.pins or request.thorough else (1,)
