"""Interval shards: each rank of an axis owns an ordered list of intervals of a tensor dim.

A plain shard gives rank ``r`` one chunk. An interval shard lists the intervals of every rank in
their local order. It describes a fused ``q|k|v`` with each part cut over the ranks, the zig-zag
order of a causal sequence, a sharded sequence flattened with its batch, and all rows on one rank.
This module imports no torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

Interval: TypeAlias = tuple[int, int]
"""(offset, length)"""
Intervals: TypeAlias = tuple[Interval, ...]
"""The intervals of one rank, in local order; ``((0, 0),)`` if it owns nothing."""

EMPTY: Intervals = ((0, 0),)
MAX_INTERVALS = 4096
"""The most intervals of one rank; a tensor that would need more is gathered instead."""


class IntervalShard(int):
    """The state of a tensor sharded by intervals; as an ``int`` it is the tensor dim.

    It equals only interval shards of the same dim and intervals, never a plain ``int``. Build it
    with :func:`interval_shard`, :func:`segmented_shard`, :func:`zigzag_shard` or
    :func:`single_owner_shard`: they return the plain dim if the intervals are those of a plain shard.

    Attributes:
        intervals: the intervals of each rank.
        total: size of the whole dim.
        lengths: local size of the dim on each rank.
        even: all ranks have the same local size.
    """

    intervals: tuple[Intervals, ...]
    total: int
    lengths: tuple[int, ...]
    even: bool
    _hash: int

    def __new__(cls, dim: int, intervals: tuple[Intervals, ...]) -> IntervalShard:
        self = super().__new__(cls, dim)
        self.intervals = intervals
        self.lengths = tuple(sum(length for _, length in held) for held in intervals)
        self.total = sum(self.lengths)
        self.even = len(set(self.lengths)) == 1
        self._hash = hash((IntervalShard, int(dim), intervals))
        return self

    def __reduce__(self) -> tuple[type[IntervalShard], tuple[int, tuple[Intervals, ...]]]:
        # not the hash, which differs between processes
        return IntervalShard, (int(self), self.intervals)

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is IntervalShard
            and self._hash == other._hash
            and int(self) == int(other)
            and self.intervals == other.intervals
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return format_interval_shard(self)

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Sizes of the segments if each segment is cut into equal chunks, else None."""
        n = len(self.intervals)
        sizes = tuple(length * n for _, length in self.intervals[0])
        expected = _segments(sizes, n) if sum(sizes) == self.total else None
        return sizes if expected == self.intervals else None

    def on(self, dim: int) -> IntervalShard:
        """The same intervals of another dim."""
        return self if int(self) == dim else _interned(dim, self.intervals)


_interned = lru_cache(maxsize=8192)(IntervalShard)


def merge_intervals(intervals: Sequence[Interval]) -> Intervals:
    """The intervals without empty ones, adjacent ones joined."""
    result: list[Interval] = []
    for offset, length in intervals:
        if length == 0:
            continue
        if result and sum(result[-1]) == offset:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((offset, length))
    return tuple(result) or EMPTY


@lru_cache(maxsize=4096)
def chunk_intervals(total: int, n: int) -> tuple[Intervals, ...]:
    """The interval of each of ``n`` ranks in a plain shard (as ``torch.chunk`` cuts)."""
    step = -(-total // n)
    starts = [min(rank * step, total) for rank in range(n)]
    return tuple(merge_intervals([(start, min(step, total - start))]) for start in starts)


def intervals_of(state: int, total: int, n: int) -> tuple[Intervals, ...]:
    """The intervals of each of ``n`` ranks for a dim of size ``total``. Raises ValueError if an interval shard is for others."""
    if not isinstance(state, IntervalShard):
        return chunk_intervals(total, n)
    if state.total != total or len(state.intervals) != n:
        text = f"{state!r} owns {state.total} elements on {len(state.intervals)} ranks, the dim has {total} on {n}"
        raise ValueError(text)
    return state.intervals


def interval_shard(dim: int, intervals: Sequence[Sequence[Interval]]) -> int:
    """The state in which rank ``r`` owns ``intervals[r]`` of a dim (the dim if plain). Raises ValueError for gaps and overlaps."""
    ranks = tuple(merge_intervals(held) for held in intervals)
    total = 0
    for offset, length in sorted(interval for held in ranks for interval in held if interval[1]):
        if offset != total or length < 0:
            raise ValueError(f"the intervals {ranks} leave a gap or overlap at {min(offset, total)}")
        total += length
    if dim < 0 or not ranks:
        text = (
            f"an interval shard needs a dim >= 0 and at least one rank, not dim {dim} and {len(ranks)} ranks"
        )
        raise ValueError(text)
    return int(dim) if ranks == chunk_intervals(total, len(ranks)) else _interned(int(dim), ranks)


def repeat_to_fit(state: IntervalShard, shape: Sequence[int], n: int) -> int | None:
    """``state`` for a tensor of this shape, its pattern repeated if the dim is a multiple of its size.

    A plan is made for the rows of one data rank. Flattened with the sequence, more rows repeat the pattern. None if the
    state does not fit.
    """
    dim = int(state)
    if dim >= len(shape) or len(state.intervals) != n or shape[dim] % state.total:
        return None
    times = shape[dim] // state.total
    if times == 1:
        return state
    starts = [k * state.total for k in range(times)]
    if times * max(map(len, state.intervals)) > MAX_INTERVALS:
        return None
    return interval_shard(
        dim, [[(start + a, length) for start in starts for a, length in held] for held in state.intervals]
    )


def segmented_shard(dim: int, sizes: Sequence[int], n: int) -> int:
    """Consecutive parts of these sizes, each cut into ``n`` equal chunks. Raises ValueError if one does not divide by ``n``."""
    if any(size % n or size <= 0 for size in sizes):
        raise ValueError(f"the parts {tuple(sizes)} do not all divide by {n} ranks")
    return interval_shard(dim, _segments(tuple(sizes), n))


def _segments(sizes: tuple[int, ...], n: int) -> tuple[Intervals, ...]:
    starts = [0, *itertools.accumulate(sizes)][:-1]
    parts = [(start, size // n) for start, size in zip(starts, sizes, strict=True)]
    return tuple(merge_intervals([(start + rank * part, part) for start, part in parts]) for rank in range(n))


def zigzag_shard(dim: int, total: int, n: int) -> int:
    """``2 n`` chunks; rank ``r`` owns chunks ``r`` and ``2 n - 1 - r``: equal work under a causal mask.

    Raises ValueError if ``total`` does not divide by ``2 n``.
    """
    step, rest = divmod(total, 2 * n)
    if rest or not step:
        text = f"{total} elements do not divide into the {2 * n} chunks of a zig-zag over {n} ranks"
        raise ValueError(text)
    return interval_shard(dim, [((r * step, step), ((2 * n - 1 - r) * step, step)) for r in range(n)])


def single_owner_shard(dim: int, total: int, n: int, owner: int) -> int:
    """Rank ``owner`` owns the whole dim. Raises ValueError if ``owner`` is no rank of the axis."""
    if not 0 <= owner < n:
        raise ValueError(f"owner {owner} is not a rank of the axis: choose 0..{n - 1}")
    return interval_shard(dim, [((0, total if r == owner else 0),) for r in range(n)])


def format_interval_shard(state: IntervalShard) -> str:
    """Text: ``"S(0; 768+768+768)"`` for segments (``4*16`` for many equal ones), else ``"S(1; 0:4,12:4 | 4:8)"``."""
    parts = state.parts
    if parts is not None:
        grouped = [(size, len(list(group))) for size, group in itertools.groupby(parts)]
        text = "+".join(f"{c}*{size}" if c > 4 else "+".join([str(size)] * c) for size, c in grouped)
    else:
        text = " | ".join(",".join(f"{a}:{b}" for a, b in held) for held in state.intervals)
    return f"S({int(state)}; {text})"


_SEGMENTS = re.compile(r"S\((\d{1,5}); ?((?:\d{1,5}\*)?\d{1,12}(?:\+(?:\d{1,5}\*)?\d{1,12})*)\)")
_INTERVALS = re.compile(r"S\((\d{1,5}); ?((?:\d{1,12}:\d{1,12})(?: ?[,|] ?\d{1,12}:\d{1,12})*)\)")


def parse_interval_shard(text: str, n: int | None = None) -> int | None:
    """The state of a text by :func:`format_interval_shard` on an axis of ``n`` ranks; None for other text.

    Segments do not tell the number of ranks: without ``n`` they are only checked, as for one rank. Raises ValueError if
    they do not divide by ``n``, if intervals are no partition over ``n`` ranks, or if they are plain chunks: those are
    written without their sizes, which would not be compared with the dim's.
    """
    match = _SEGMENTS.fullmatch(text)
    if match is not None:
        sizes: list[int] = []
        for term in match[2].split("+"):
            times, _, size = term.rpartition("*")
            sizes += [int(size)] * int(times or 1)
        return _not_chunks(text, segmented_shard(int(match[1]), sizes, n or 1), n or 1)
    match = _INTERVALS.fullmatch(text)
    if match is None:
        return None
    ranks = [
        [(int(a), int(b)) for a, _, b in (pair.strip().partition(":") for pair in rank.split(","))]
        for rank in match[2].split("|")
    ]
    if n is not None and len(ranks) != n:
        raise ValueError(f"state {text!r} gives intervals for {len(ranks)} ranks, but the axis has {n}")
    return _not_chunks(text, interval_shard(int(match[1]), ranks), len(ranks))


def _not_chunks(text: str, state: int, n: int) -> int:
    if n > 1 and not isinstance(state, IntervalShard):
        raise ValueError(f"state {text!r} gives each of {n} ranks its chunk of the dim: write 'S({state})'")
    return state
