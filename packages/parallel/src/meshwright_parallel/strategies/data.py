"""Data parallelism: the rows of the batch are shared along the axis `dp`, and gradients are summed.

A batch tensor whose dim 0 is the batch is sharded on it. Whatever else enters is replicated, which is always right,
since a plain tensor is the global value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.strategy.strategy import (
    CollectiveUse,
    GradientKind,
    Link,
    ParameterSize,
    SearchRequest,
    Strategy,
    StrategyCost,
    divisors,
    rows_state,
)

if TYPE_CHECKING:
    from meshwright_dtensor.sharding.states import State

BUCKET_BYTES = 25 * 2**20
"""Size at which a bucket of gradients is summed; from here on nothing is gained by moving more at once."""
SINGLE_BYTES = 2**19
"""Size from which a tensor that ranks share is moved alone, from where it lies, on a CPU: it would be copied twice."""
SUMMED_ALONE_BYTES = 2**22
"""The same for a gradient that is only summed: below, the stalls of one more collective cost more than the copy."""


class Data(Strategy):
    """Batch inputs are S(0), replicated parameters have partial gradients that the reduction engine sums."""

    name: ClassVar[str] = "data"
    axis: ClassVar[str] = "dp"
    order: ClassVar[int] = 10
    gradient: ClassVar[GradientKind] = "deferred"

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size that divide the batch: more ranks than rows would idle."""
        return [d for d in divisors(request.world_size) if request.batch_size % d == 0]

    def batch_factor(self, degree: int) -> int:
        """The local batch is a `degree`-th of the batch."""
        return degree

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Bucketed ring all-reduces of the gradients, hidden behind the backward pass but for the last bucket.

        The buckets start evenly spread over the backward pass: the last can only start when that has ended, and the
        link works on them one after the other, so what is exposed is the larger of the last bucket and of what the
        backward pass cannot hide.
        """
        if degree <= 1 or request.gradient_bytes <= 0:
            return StrategyCost()
        staying = 0 if request.accelerated else sum(_staying(unit) * n for unit, n in counted(request.units))
        count = max(1, round(request.gradient_bytes / BUCKET_BYTES))
        each = request.gradient_bytes / count
        one = link.seconds("all_reduce", each, degree)
        total = one * count
        hideable = request.backward_seconds * (count - 1) / count
        exposed = max(one, total - hideable)
        use = CollectiveUse("all_reduce", round(each), count, "backward", "gradients, in buckets")
        return StrategyCost(
            exposed_seconds=exposed,
            overlapped_seconds=max(0.0, total - exposed),
            collectives=(use,),
            lasting=min(1.0, staying / request.gradient_bytes),
            bucket=BUCKET_BYTES,
        )

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """S(0) where dim 0 is the batch and the degree divides it, else replicated."""
        return rows_state(shape, batch_size, degree)


def counted(units: Iterable[Sequence[ParameterSize]]) -> Iterable[tuple[Sequence[ParameterSize], int]]:
    """Each unit with how often it is there: most are one and the same object, and to hash one is dear."""
    numbers = Counter(map(id, units))
    return [(unit, numbers[key]) for key, unit in {id(unit): unit for unit in units}.items()]


def _staying(unit: Iterable[ParameterSize]) -> int:
    """Bytes of gradients in buckets, whose memory a CPU takes again each step (engine.buckets.Filling.alone says which)."""
    return sum(
        p.numel * p.itemsize[0]
        for p in unit
        # what is computed with in another dtype is copied anyway
        if p.trainable and (p.itemsize[0] != p.itemsize[1] or p.numel * p.itemsize[0] < SUMMED_ALONE_BYTES)
    )
