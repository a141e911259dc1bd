"""Tensor parallelism: weights and the compute inside a layer are sharded along the axis `tp`.

The planner's placement search decides which dim of which tensor is sharded, and the plan says so. This strategy only tells
which degrees to search.

`tp_outer` is a second tensor axis outside of `tp`, over a slower link: where `tp` is as wide as a node, it goes across
nodes. Placements on both axes are searched together, each with the costs of its own link. It is used where the user pins it
(`degrees={"tp_outer": 2}`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from meshwright_dtensor.strategy import SearchRequest, Strategy, divisors


class Tensor(Strategy):
    """Placements on `tp` come from `plan.parameters` and `plan.activations`; the batch is replicated."""

    name: ClassVar[str] = "tensor"
    axis: ClassVar[str] = "tp"
    order: ClassVar[int] = 40
    placement_search: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Every divisor of the world size: the search replicates what a degree does not divide."""
        return divisors(request.world_size)


class TensorOuter(Tensor):
    """Placements on `tp_outer` come from `plan.parameters` and `plan.activations`; the batch is replicated."""

    name: ClassVar[str] = "tensor-outer"
    axis: ClassVar[str] = "tp_outer"
    order: ClassVar[int] = 38
    optional: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """1; every divisor of the world size where the axis is pinned."""
        return super().degrees(request) if self.axis in request.pins or request.exhaustive else (1,)
