"""Data parallelism: the rows of the batch are sharded along the axis `dp`, and gradients are summed.

A batch tensor whose dim 0 is the batch is sharded on it. Any other input is replicated, which is always right, since a plain
tensor is the global value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.strategy import CollectiveUse, Strategy, StrategyCost, divisors, rows_state

if TYPE_CHECKING:
    from meshwright_dtensor.sharding.states import State
    from meshwright_dtensor.strategy import GradientKind, Link, ParameterSize, SearchRequest

BUCKET_BYTES = 25 * 2**20
"""Size at which a gradient bucket is reduced. Larger buckets gain nothing."""
SINGLE_BYTES = 2**19
"""Size from which a sharded tensor has a collective of its own, without copies, on a CPU."""
SUMMED_ALONE_BYTES = 2**22
"""The same for an all-reduced gradient. Below this size one more collective costs more than the copy."""


class RowStrategy(Strategy):
    """A strategy whose ranks compute with different rows of the batch; gradients are summed later."""

    gradient: ClassVar[GradientKind] = "deferred"

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the world size that divide the batch."""
        return [d for d in divisors(request.world_size) if request.batch_size % d == 0]

    def batch_factor(self, degree: int) -> int:
        """The local batch is the batch divided by `degree`."""
        return degree

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """S(0) where dim 0 is the batch and the degree divides it, else replicated."""
        return rows_state(shape, batch_size, degree)


class Data(RowStrategy):
    """Batch inputs are S(0). Replicated parameters have partial gradients, which the reduction engine sums."""

    name: ClassVar[str] = "data"
    axis: ClassVar[str] = "dp"
    order: ClassVar[int] = 10

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Bucketed all-reduces of the gradients, overlapped with the backward pass except for the last bucket.

        The buckets start evenly spread over the backward pass. The last one starts when the pass has ended, and the link reduces
        one bucket after the other. So the exposed time is that of the last bucket, or what the backward pass cannot hide.
        """
        if degree <= 1 or request.sizes.gradient_bytes <= 0:
            return StrategyCost()
        reused = 0
        if not request.step.accelerated:
            reused = sum(_reused_bytes(group) * n for group, n in counted(request.sizes.units))
        count = max(1, round(request.sizes.gradient_bytes / BUCKET_BYTES))
        bucket_bytes = request.sizes.gradient_bytes / count
        bucket_seconds = link.seconds("all_reduce", bucket_bytes, degree)
        total = bucket_seconds * count
        hideable = request.step.backward_seconds * (count - 1) / count
        exposed = max(bucket_seconds, total - hideable)
        use = CollectiveUse("all_reduce", round(bucket_bytes), count, "backward", "gradients, in buckets")
        return StrategyCost(
            exposed_seconds=exposed,
            overlapped_seconds=max(0.0, total - exposed),
            slack_seconds=min(
                exposed - bucket_seconds, request.step.interference * max(0.0, total - exposed)
            ),
            collectives=(use,),
            persistent_gradients=min(1.0, reused / request.sizes.gradient_bytes),
            bucket_bytes=BUCKET_BYTES,
        )


def counted(units: Iterable[Sequence[ParameterSize]]) -> Iterable[tuple[Sequence[ParameterSize], int]]:
    """Each unit with its number of occurrences, by identity: most are the same object, and hashing one is slow."""
    numbers = Counter(map(id, units))
    return [(unit, numbers[key]) for key, unit in {id(unit): unit for unit in units}.items()]


def _reused_bytes(unit: Iterable[ParameterSize]) -> int:
    """Bytes of gradients in buckets, whose memory a CPU reuses in each step (see engine.buckets.BucketSizes)."""
    return sum(
        p.numel * p.itemsize[0]
        for p in unit
        # a gradient in another dtype than the parameter is copied in any case
        if p.trainable and (p.itemsize[0] != p.itemsize[1] or p.numel * p.itemsize[0] < SUMMED_ALONE_BYTES)
    )
