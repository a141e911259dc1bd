"""Shards through view, reshape, flatten and unflatten.

The elements of a rank are a pattern in the flat (row-major) order. A view keeps that order, so the result is sharded on the
dim whose intervals give the same pattern, if there is such a dim. Then no data moves.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise

from meshwright_dtensor.sharding.intervals import (
    EMPTY,
    MAX_INTERVALS,
    Interval,
    Intervals,
    interval_shard,
    intervals_of,
    merge_intervals,
)

Shape = tuple[int, ...]


@lru_cache(maxsize=65536)
def through_view(before: Shape, after: Shape, state: int, n: int) -> int | None:
    """The shard of shape ``after`` with the same elements on each of ``n`` ranks as shard ``state`` of shape ``before``.

    None if no dim of ``after`` gives these elements, or only with too many intervals.
    """
    group = next((group for group in groups(before, after) if int(state) in group[0]), None)
    if group is None:
        return None
    group_before, group_after = group
    index = group_before.index(int(state))
    outer = math.prod(before[d] for d in group_before[:index])
    inner = math.prod(before[d] for d in group_before[index + 1 :])
    ranks = intervals_of(state, before[int(state)], n)
    if outer * max(map(len, ranks)) > MAX_INTERVALS:
        return None
    size = before[int(state)]
    patterns = [_flat(held, outer, size, inner) for held in ranks]
    for k, dim in enumerate(group_after):
        if after[dim] == 1 and math.prod(after[d] for d in group_after) > 1:
            continue
        outer = math.prod(after[d] for d in group_after[:k])
        inner = math.prod(after[d] for d in group_after[k + 1 :])
        matching = _matching(patterns, outer, after[dim], inner) if outer <= MAX_INTERVALS else None
        if matching is not None:
            return interval_shard(dim, matching)
    return None


def groups(before: Shape, after: Shape) -> Iterator[tuple[range, range]]:
    """The dims that a view joins or splits: the smallest groups of consecutive dims, as (of before, of after), with one size."""
    if 0 in before or math.prod(before) != math.prod(after):
        # without elements, or a view in another dtype
        return
    i = j = 0
    while i < len(before) or j < len(after):
        first, first_after = i, j
        i, j = min(i + 1, len(before)), min(j + 1, len(after))
        while (a := math.prod(before[first:i])) != (b := math.prod(after[first_after:j])):
            i, j = (i + 1, j) if a < b else (i, j + 1)
        yield range(first, i), range(first_after, j)


def _matching(patterns: Sequence[Intervals], outer: int, size: int, inner: int) -> list[Intervals] | None:
    """The intervals per rank of a dim of ``size`` that give these flat patterns, None if no intervals do."""
    matching = []
    for flat in patterns:
        intervals = _first_period(flat, size, inner)
        if intervals is None or _flat(intervals, outer, size, inner) != flat:
            return None
        matching.append(intervals)
    return matching


def _flat(intervals: Sequence[Interval], outer: int, size: int, inner: int) -> Intervals:
    """The intervals of a dim of ``size`` as intervals in the flat order of ``outer x size x inner`` elements."""
    disjoint = all(n for _, n in intervals) and not any(sum(a) == b[0] for a, b in pairwise(intervals))
    # the last interval of a repetition may touch the first one of the next
    if intervals and disjoint and (outer == 1 or intervals[0][0] > 0 or sum(intervals[-1]) < size):
        step = size * inner
        scaled = [(start * inner, length * inner) for start, length in intervals]
        return tuple([(o + start, length) for o in range(0, outer * step, step) for start, length in scaled])
    return merge_intervals([((o * size + s) * inner, n * inner) for o in range(outer) for s, n in intervals])


def _first_period(flat: Intervals, size: int, inner: int) -> Intervals | None:
    """The intervals in the first ``size * inner`` elements, in units of ``inner``; None if one cuts a unit."""
    period, intervals = size * inner, []
    for start, length in flat:
        if start >= period:
            break
        length = min(length, period - start)
        if start % inner or length % inner:
            return None
        intervals.append((start // inner, length // inner))
    # not merged: they do not touch, since those of the pattern do not
    return tuple(intervals) or EMPTY


def local_slice(intervals: Intervals, start: int, stop: int) -> tuple[Intervals, int, int] | None:
    """The part of a rank's ``intervals`` in ``start .. stop`` of the dim; None if it is not contiguous in the local tensor.

    Returns its intervals counted from ``start``, its offset in the local tensor, its length.
    """
    position, pieces, local = 0, [], []
    for offset, length in intervals:
        low, high = max(start, offset), min(stop, offset + length)
        if low < high:
            pieces.append((low - start, high - low))
            local.append((position + low - offset, high - low))
        position += length
    merged = merge_intervals(local)
    return None if len(merged) > 1 else (merge_intervals(pieces), *merged[0])


def concatenated_state(states: Sequence[int], sizes: Sequence[int], dim: int, n: int) -> int:
    """The state of the concatenation along ``dim`` of operands of these sizes in these states."""
    ranks: list[list[Interval]] = [[] for _ in range(n)]
    start = 0
    for state, size in zip(states, sizes, strict=True):
        for rank, intervals in enumerate(intervals_of(state, size, n)):
            ranks[rank] += [(start + offset, length) for offset, length in intervals]
        start += size
    return interval_shard(dim, ranks)
