"""Tensor parallelism: weights and the work inside a layer are shared along the axis `tp`.

Which tensor dim of which value is sharded is the planner's to find (placement search) and the plan's to say; this
strategy only tells which degrees are worth searching.
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
