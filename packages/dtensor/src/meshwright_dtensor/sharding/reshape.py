"""Where a shard goes through a change of shape: one function for any view, reshape, flatten or unflatten.

What a rank owns of one dim is a pattern in the flat (row-major) order of the elements.  A view keeps the flat order, so the
shard of the result is the dim whose intervals make the same pattern, if there is one; then no data has to move.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

from meshwright_dtensor.sharding.intervals import (
    MAX_INTERVALS,
    NOTHING,
    Interval,
    Intervals,
    intervals_of,
    merged,
    runs,
)

Shape = tuple[int, ...]


@lru_cache(maxsize=65536)
def through_view(before: Shape, after: Shape, state: int, n: int) -> int | None:
    """The state of a tensor of shape ``after`` that holds on each rank what one of shape ``before`` holds in ``state``.

    Args:
        state: shard of a dim of ``before``, plain or Runs.
        n: ranks of the axis.

    Returns:
        The state, or None where the elements of a rank are no intervals of one dim (or too many to be of use).
    """
    if 0 in before or math.prod(before) != math.prod(after):
        return None
    group = next((g for g in _groups(before, after) or () if int(state) in g[0]), None)
    if group is None:
        return None
    here, there = group
    place = here.index(int(state))
    outer = math.prod(before[d] for d in here[:place])
    inner = math.prod(before[d] for d in here[place + 1 :])
    own = intervals_of(state, before[int(state)], n)
    if outer * max(map(len, own)) > MAX_INTERVALS:
        return None
    size = before[int(state)]
    pattern = [_flat(intervals, outer, size, inner) for intervals in own]
    for k, dim in enumerate(there):
        if after[dim] == 1 and math.prod(after[d] for d in there) > 1:
            continue
        times = math.prod(after[d] for d in there[:k])
        grain = math.prod(after[d] for d in there[k + 1 :])
        found = [_within(flat, after[dim], grain) for flat in pattern]
        if any(f is None for f in found) or times > MAX_INTERVALS:
            continue
        if all(_flat(f or (), times, after[dim], grain) == p for f, p in zip(found, pattern, strict=True)):
            return runs(dim, [f or () for f in found])
    return None


def _flat(own: Sequence[Interval], outer: int, size: int, inner: int) -> Intervals:
    apart = all(length for _, length in own) and not any(sum(a) == b[0] for a, b in pairwise(own))
    # repeated, the last one may touch the first
    if own and apart and (outer == 1 or own[0][0] > 0 or sum(own[-1]) < size):
        step = size * inner
        scaled = [(start * inner, length * inner) for start, length in own]
        return tuple([(o + start, length) for o in range(0, outer * step, step) for start, length in scaled])
    return merged([(o * size * inner + s * inner, n * inner) for o in range(outer) for s, n in own])


def _within(flat: Intervals, size: int, grain: int) -> Intervals | None:
    """What the pattern owns of the first ``size * grain`` elements, in units of ``grain``; None if it cuts a unit."""
    period, found = size * grain, []
    for start, length in flat:
        if start >= period:
            break
        length = min(length, period - start)
        if start % grain or length % grain:
            return None
        found.append((start // grain, length // grain))
    return tuple(found) or NOTHING  # as far apart as the pattern's


def _groups(before: Shape, after: Shape) -> list[tuple[list[int], list[int]]] | None:
    """The smallest runs of dims of either shape that hold equally many elements."""
    i = j = 0
    result = []
    while i < len(before) or j < len(after):
        here: list[int] = []
        there: list[int] = []
        a = b = 1
        if i < len(before):
            here, a, i = [i], before[i], i + 1
        if j < len(after):
            there, b, j = [j], after[j], j + 1
        while a != b:
            if a < b:
                if i >= len(before):
                    return None
                here.append(i)
                a *= before[i]
                i += 1
            else:
                if j >= len(after):
                    return None
                there.append(j)
                b *= after[j]
                j += 1
        result.append((here, there))
    return result


def part_of(own: Intervals, start: int, stop: int) -> tuple[Intervals, int, int] | None:
    """Of what one rank owns, the part in ``start .. stop`` of the dim: (its intervals counted from ``start``, where it begins
    in the local tensor, its length); None where it is not in one piece there.
    """
    at, found, places = 0, [], []
    for offset, length in own:
        low, high = max(start, offset), min(stop, offset + length)
        if low < high:
            found.append((low - start, high - low))
            places.append((at + low - offset, high - low))
        at += length
    joined = merged(places)
    return None if len(joined) > 1 else (merged(found), *joined[0])


def joined(states: Sequence[int], sizes: Sequence[int], dim: int, n: int) -> int:
    """The state of operands of these sizes in these states, laid end to end along ``dim``."""
    ranks: list[list[Interval]] = [[] for _ in range(n)]
    start = 0
    for state, size in zip(states, sizes, strict=True):
        for rank, own in enumerate(intervals_of(state, size, n)):
            ranks[rank] += [(start + offset, length) for offset, length in own]
        start += size
    return runs(dim, ranks)
