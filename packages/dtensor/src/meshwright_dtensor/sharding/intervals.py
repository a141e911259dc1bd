"""Runs: a tensor dim that each rank of an axis owns as an ordered list of intervals.

A plain shard gives rank ``r`` one chunk.  Runs say for every rank which intervals it owns, in the order in which they lie
in its local tensor: each part of a fused ``q|k|v`` cut over the ranks, the zig-zag order of a causal sequence, a sharded
sequence flattened with its batch, or all rows on one rank.  This module imports nothing of torch.
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
"""What one rank owns, in local order; ``((0, 0),)`` where it owns nothing."""

NOTHING: Intervals = ((0, 0),)
MAX_INTERVALS = 4096
"""More intervals than this on one rank are no layout worth having: what would make them is gathered instead."""


class Runs(int):
    """The state of a value sharded in runs; as an ``int`` it is the tensor dim.

    Equal (and alike in sets and dicts) only to Runs of the same dim and intervals, never to a plain ``int``.  Made by
    :func:`runs`, :func:`segments`, :func:`zigzag` or :func:`owned`, which give the plain dim where the intervals are the
    chunks of a plain shard.

    Attributes:
        intervals: what each rank owns.
        total: size of the whole dim.
        lengths: how much each rank owns.
        even: every rank owns equally much.
    """

    intervals: tuple[Intervals, ...]
    total: int
    lengths: tuple[int, ...]
    even: bool
    _hash: int

    def __new__(cls, dim: int, intervals: tuple[Intervals, ...]) -> Runs:
        self = super().__new__(cls, dim)
        self.intervals = intervals
        self.lengths = tuple(sum(length for _, length in own) for own in intervals)
        self.total = sum(self.lengths)
        self.even = len(set(self.lengths)) == 1
        self._hash = hash((Runs, int(dim), intervals))
        return self

    def __reduce__(self) -> tuple[type[Runs], tuple[int, tuple[Intervals, ...]]]:
        return Runs, (int(self), self.intervals)  # the hash is another one in every process

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            type(other) is Runs
            and self._hash == other._hash
            and int(self) == int(other)
            and self.intervals == other.intervals
        )

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return format_runs(self)

    @property
    def parts(self) -> tuple[int, ...] | None:
        """Sizes of the segments, each of which is cut into equal chunks; None where that is not what it is."""
        n = len(self.intervals)
        sizes = tuple(length * n for _, length in self.intervals[0])
        expected = _segments(sizes, n) if sum(sizes) == self.total else None
        return sizes if expected == self.intervals else None

    def on(self, dim: int) -> Runs:
        """The same intervals of another dim."""
        return self if int(self) == dim else _made(dim, self.intervals)


def merged(intervals: Sequence[Interval]) -> Intervals:
    """The intervals without empty ones, neighbours joined."""
    result: list[Interval] = []
    for offset, length in intervals:
        if length == 0:
            continue
        if result and sum(result[-1]) == offset:
            result[-1] = (result[-1][0], result[-1][1] + length)
        else:
            result.append((offset, length))
    return tuple(result) or NOTHING


@lru_cache(maxsize=4096)
def chunks(total: int, n: int) -> tuple[Intervals, ...]:
    """What each of ``n`` ranks owns of a plain shard (as ``torch.chunk`` cuts)."""
    step = -(-total // n)
    starts = [min(rank * step, total) for rank in range(n)]
    return tuple(merged([(start, min(step, total - start))]) for start in starts)


def intervals_of(state: int, total: int, n: int) -> tuple[Intervals, ...]:
    """What each of ``n`` ranks owns of a dim of size ``total`` in a shard state, plain or Runs.

    Raises:
        ValueError: Runs of another size or number of ranks.
    """
    if not isinstance(state, Runs):
        return chunks(total, n)
    if state.total != total or len(state.intervals) != n:
        raise ValueError(
            f"{state!r} owns {state.total} elements on {len(state.intervals)} ranks, the dim has {total} on {n}"
        )
    return state.intervals


def runs(dim: int, intervals: Sequence[Sequence[Interval]]) -> int:
    """The state in which rank ``r`` owns ``intervals[r]`` of tensor dim ``dim``: Runs, or the dim of a plain shard.

    Raises:
        ValueError: the intervals do not cover ``0 .. total`` exactly once.
    """
    own = tuple(merged(i) for i in intervals)
    at = 0
    for offset, length in sorted(interval for i in own for interval in i if interval[1]):
        if offset != at or length < 0:
            raise ValueError(f"the intervals {own} leave a gap or overlap at {min(offset, at)}")
        at += length
    if dim < 0 or not own:
        raise ValueError(f"runs need a dim >= 0 and at least one rank, not dim {dim} and {len(own)} ranks")
    return int(dim) if own == chunks(at, len(own)) else _made(int(dim), own)


def fitted(state: Runs, shape: Sequence[int], n: int) -> int | None:
    """``state`` for a tensor of this shape: as it is, or repeated where the dim is a multiple of what it owns.

    A plan is made for the rows that one data rank has; flattened with the sequence, more rows repeat the pattern.

    Returns:
        The state, or None where it does not fit.
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
    return runs(
        dim, [[(start + a, length) for start in starts for a, length in own] for own in state.intervals]
    )


@lru_cache(maxsize=8192)
def _made(dim: int, intervals: tuple[Intervals, ...]) -> Runs:
    return Runs(dim, intervals)


def segments(dim: int, sizes: Sequence[int], n: int) -> int:
    """Consecutive parts of these sizes, each cut into ``n`` equal chunks.

    Raises:
        ValueError: a part does not divide by ``n``.
    """
    if any(size % n or size <= 0 for size in sizes):
        raise ValueError(f"the parts {tuple(sizes)} do not all divide by {n} ranks")
    return runs(dim, _segments(tuple(sizes), n))


def _segments(sizes: tuple[int, ...], n: int) -> tuple[Intervals, ...]:
    starts = [0, *itertools.accumulate(sizes)]
    return tuple(
        merged(
            [(start + rank * (size // n), size // n) for start, size in zip(starts[:-1], sizes, strict=True)]
        )
        for rank in range(n)
    )


def zigzag(dim: int, total: int, n: int) -> int:
    """``2 n`` chunks of which rank ``r`` owns number ``r`` and number ``2 n - 1 - r``: equal work under a causal mask.

    Raises:
        ValueError: ``total`` does not divide by ``2 n``.
    """
    step, rest = divmod(total, 2 * n)
    if rest or not step:
        raise ValueError(
            f"{total} elements do not divide into the {2 * n} chunks of a zig-zag over {n} ranks"
        )
    return runs(dim, [((r * step, step), ((2 * n - 1 - r) * step, step)) for r in range(n)])


def owned(dim: int, total: int, n: int, owner: int) -> int:
    """Rank ``owner`` owns the whole dim, the others nothing of it.

    Raises:
        ValueError: ``owner`` is no rank of the axis.
    """
    if not 0 <= owner < n:
        raise ValueError(f"owner {owner} is none of the ranks 0..{n - 1}")
    return runs(dim, [((0, total if r == owner else 0),) for r in range(n)])


def format_runs(state: Runs) -> str:
    """``"S(0; 768+768+768)"`` for parts that are each cut into chunks (``4*16`` for many equal ones), else what each rank
    owns: ``"S(1; 0:4,12:4 | 4:8)"``.
    """
    parts = state.parts
    if parts is not None:
        grouped = [(size, len(list(group))) for size, group in itertools.groupby(parts)]
        text = "+".join(f"{c}*{size}" if c > 4 else "+".join([str(size)] * c) for size, c in grouped)
    else:
        text = " | ".join(",".join(f"{a}:{b}" for a, b in own) for own in state.intervals)
    return f"S({int(state)}; {text})"


_PARTS = re.compile(r"S\((\d{1,5}); ?((?:\d{1,5}\*)?\d{1,12}(?:\+(?:\d{1,5}\*)?\d{1,12})*)\)")
_OWNED = re.compile(r"S\((\d{1,5}); ?((?:\d{1,12}:\d{1,12})(?: ?[,|] ?\d{1,12}:\d{1,12})*)\)")


def parse_runs(text: str, n: int | None = None) -> int | None:
    """The state that :func:`format_runs` wrote for an axis of ``n`` ranks, or None if ``text`` is no such form.

    Parts say nothing of the number of ranks: without ``n`` they are only checked, as parts of one rank.

    Raises:
        ValueError: parts do not divide by ``n``, or intervals are no partition or are not those of ``n`` ranks.
    """
    found = _PARTS.fullmatch(text)
    if found is not None:
        sizes: list[int] = []
        for term in found[2].split("+"):
            times, _, size = term.rpartition("*")
            sizes += [int(size)] * int(times or 1)
        return segments(int(found[1]), sizes, n or 1)
    found = _OWNED.fullmatch(text)
    if found is None:
        return None
    own = [
        [(int(a), int(b)) for a, _, b in (pair.strip().partition(":") for pair in rank.split(","))]
        for rank in found[2].split("|")
    ]
    if n is not None and len(own) != n:
        raise ValueError(f"state {text!r} names what {len(own)} ranks own, and the axis has {n}")
    return runs(int(found[1]), own)
