"""Ragged shards: consecutive parts of a dim that end at borders of units, which ranks have whole.

A unit is some rows: one row, the fewest rows that are whole blocks of N elements (states of block-wise quantized optimizers), or
all rows of a tensor. This module imports no torch.

Source: RaggedShard of "veScale-FSDP: Flexible and High-Performance FSDP at Scale", 2026.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Sequence

from meshwright_dtensor.sharding.boxes import region_of
from meshwright_dtensor.sharding.intervals import (
    Interval,
    IntervalShard,
    chunk_intervals,
    interval_shard,
    merge_intervals,
)
from meshwright_dtensor.sharding.states import States


def rows_of_blocks(shape: Sequence[int], block: int) -> int:
    """The fewest rows (of dim 0) that are whole blocks of `block` elements, in the order of a contiguous tensor of `shape`."""
    row = math.prod(shape[1:])
    return block // math.gcd(block, row) if row else 1


def unit_lengths(total: int, ranks: int, unit: int, name: str = "") -> tuple[int, ...]:
    """The elements of each rank, of a dim of `total` cut at multiples of `unit` as evenly as those allow.

    Where the chunks of torch.chunk end there, it is those. With fewer units than ranks, `name` decides which ranks have one, so
    that tensors of different names are spread.
    """
    chunks = tuple(length for ((_, length),) in chunk_intervals(total, ranks))
    if all(end % unit == 0 or end == total for end in itertools.accumulate(chunks)):
        return chunks
    units = -(-total // unit)
    if units >= ranks:
        ends = [min(rank * units // ranks * unit, total) for rank in range(ranks + 1)]
        return tuple(end - start for start, end in itertools.pairwise(ends))
    first = zlib.crc32(name.encode())
    owners = sorted((first + k * ranks // units) % ranks for k in range(units))
    lengths = [0] * ranks
    for k, owner in enumerate(owners):
        lengths[owner] = min(unit, total - k * unit)
    return tuple(lengths)


def ragged_shard(dim: int, lengths: Sequence[int], repeats: int = 1) -> int:
    """The state in which rank ``r`` owns the next ``lengths[r]`` elements of each of `repeats` equal parts of a dim.

    With `repeats`, an inner mesh axis shards the parts: each of its ranks has one, and the outer ranks share it.
    Raises ValueError for lengths that are negative, or none at all.
    """
    if not lengths or min(lengths) < 0 or repeats < 1:
        raise ValueError(f"the lengths {tuple(lengths)} are not one number >= 0 for each rank")
    ends = list(itertools.accumulate(lengths, initial=0))
    parts = [
        merge_intervals([(part * ends[-1] + start, length) for part in range(repeats)])
        for start, length in zip(ends, lengths)
    ]
    return interval_shard(dim, parts)


def spans_along(
    shape: tuple[int, ...], sizes: Sequence[int], coords: Sequence[int], states: States, axis: int
) -> tuple[Interval, ...] | None:
    """Per rank of mesh axis number `axis`, the part (first, length) of a value that all of them have after a gather along it.

    The other arguments are those of `region_of`; the value is this rank's part with respect to the other axes.

    Returns: None if some rank's part is not one run of that value, so that its shards cannot be put one after the other.
    """
    dim, n = int(states[axis]), sizes[axis]
    inside = [
        i for i, s in enumerate(states) if i != axis and sizes[i] > 1 and isinstance(s, int) and int(s) == dim
    ]
    if not isinstance(states[axis], IntervalShard) and not inside:
        return tuple(span for (span,) in chunk_intervals(shape[dim], n))
    without = tuple("I" if i == axis else state for i, state in enumerate(states))
    gathered = region_of(shape, sizes, coords, without)[dim]
    spans = []
    for rank in range(n):
        there = [rank if i == axis else coord for i, coord in enumerate(coords)]
        span = _span_in(gathered, region_of(shape, sizes, there, states)[dim])
        if span is None:
            return None
        spans.append(span)
    return tuple(spans)


def can_gather(shape: tuple[int, ...], sizes: Sequence[int], states: States, axis: int) -> bool:
    """Whether `spans_along` knows the parts of a sharded value on every rank."""
    dim = states[axis]
    # of the other axes, only those that shard the same dim count
    ranges = [
        range(n if isinstance(s, int) and int(s) == int(dim) else 1)
        for n, s in zip(sizes, states, strict=True)
    ]
    ranges[axis] = range(1)
    return all(spans_along(shape, sizes, at, states, axis) is not None for at in itertools.product(*ranges))


def _span_in(outer: Sequence[Interval], inner: Sequence[Interval]) -> Interval | None:
    """Where `inner` intervals of a dim are among the elements of `outer` ones: (first, length); None if not one run of them."""
    run: list[Interval] = []
    for start, length in inner:
        if not length:
            continue
        at = 0
        for offset, size in outer:
            if offset <= start and start + length <= offset + size:
                run.append((at + start - offset, length))
                break
            at += size
        else:
            return None
    merged = merge_intervals(run)
    return merged[0] if len(merged) == 1 else None
