"""A strategy: ranks of the axis "acme" share the rows of the batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import (
    CollectiveUse,
    GradientKind,
    Link,
    SearchRequest,
    Strategy,
    StrategyCost,
    divisors,
    rows_state,
)


class Rows(Strategy):
    """Each rank has a part of the rows, all parameters, and its part of their gradients."""

    name: ClassVar[str] = "acme-rows"
    axis: ClassVar[str] = "acme"
    order: ClassVar[int] = 12
    # a rank sees its rows alone, so autograd gives it a part of each gradient
    gradient: ClassVar[GradientKind] = "deferred"
    optional: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """The divisors of the ranks that divide the batch too."""
        return [degree for degree in divisors(request.world_size) if request.batch_size % degree == 0]

    def batch_factor(self, degree: int) -> int:
        """Other axes see a part of the rows."""
        return degree

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """One sum of all gradients, which nothing overlaps."""
        if degree == 1:
            return StrategyCost()
        use = CollectiveUse("all_reduce", request.sizes.gradient_bytes, why="gradients")
        return StrategyCost(exposed_seconds=link.seconds(use.kind, use.nbytes, degree), collectives=(use,))

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """Tensors of the batch are sharded by rows."""
        return rows_state(shape, batch_size, degree)
