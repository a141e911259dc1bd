"""RunShard: an interval shard as a torch placement, for users who place tensors themselves.

    mw.distribute(qkv, mesh, [RunShard.parts(0, (64, 32, 32), 2)])

It is registered through the ``meshwright_placements`` hook as ``"run"``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.distributed.tensor import Shard

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding import intervals as runs


class RunShard(Shard):
    """Shard of tensor dim ``dim`` of which rank ``r`` of the axis owns ``intervals[r]``, in that order.

    Only global tensors have it: stock DTensor would shard in chunks.

    Args:
        dim: the tensor dim; negative counts from the end.
        intervals: per rank its (offset, length) pairs, which together cover the dim exactly once.

    Raises UnsupportedError: the intervals leave a gap or overlap.
    """

    intervals: tuple[runs.Intervals, ...]

    def __new__(cls, dim: int, intervals: Sequence[Sequence[runs.Interval]]) -> RunShard:
        return Shard.__new__(cls, dim)  # type: ignore[call-arg]

    def __init__(self, dim: int, intervals: Sequence[Sequence[runs.Interval]]) -> None:
        super().__init__(dim)
        try:
            runs.interval_shard(0, intervals)
        except ValueError as error:
            raise UnsupportedError(f"{error}; every element of the dim belongs to exactly one rank") from None
        self.intervals = tuple(runs.merge_intervals(rank_intervals) for rank_intervals in intervals)

    @classmethod
    def parts(cls, dim: int, sizes: Sequence[int], ranks: int) -> RunShard:
        """Consecutive parts (fused q|k|v), each cut into one chunk per rank; every size divides by ``ranks``."""
        return cls._of(dim, lambda: runs.segmented_shard(0, sizes, ranks), sum(sizes), ranks)

    @classmethod
    def zigzag(cls, dim: int, size: int, ranks: int) -> RunShard:
        """Rank ``r`` owns chunks ``r`` and ``2 ranks - 1 - r`` of ``2 ranks``; ``size`` divides by ``2 ranks``."""
        return cls._of(dim, lambda: runs.zigzag_shard(0, size, ranks), size, ranks)

    @classmethod
    def owned(cls, dim: int, size: int, ranks: int, owner: int) -> RunShard:
        """Rank ``owner`` owns all of the dim."""
        return cls._of(dim, lambda: runs.single_owner_shard(0, size, ranks, owner), size, ranks)

    @classmethod
    def _of(cls, dim: int, make: Callable[[], int], size: int, ranks: int) -> RunShard:
        try:
            state = make()
        except ValueError as error:
            raise UnsupportedError(str(error)) from None
        return cls(dim, runs.intervals_of(state, size, ranks))

    @property
    def size(self) -> int:
        """Elements of the dim that all ranks own together."""
        return sum(length for held in self.intervals for _, length in held)

    def state(self, dim: int) -> int:
        """The state for non-negative ``dim``: an IntervalShard, or the dim itself if the intervals are plain chunks."""
        return runs.interval_shard(dim, self.intervals)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RunShard) and self.dim == other.dim and self.intervals == other.intervals

    def __hash__(self) -> int:
        return hash((RunShard, self.dim, self.intervals))

    def __repr__(self) -> str:
        return f"RunShard{runs.format_interval_shard(runs.IntervalShard(self.dim, self.intervals))[1:]}"

    __str__ = __repr__
