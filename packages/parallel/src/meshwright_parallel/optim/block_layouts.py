"""Layouts in which every block of elements of a value is on one rank, whole. Imports no torch.

A block is so many elements that follow each other in a contiguous tensor, as optimizers quantize their states in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from meshwright_dtensor.sharding.boxes import region_of
from meshwright_dtensor.sharding.intervals import (
    Intervals,
    IntervalShard,
    chunk_intervals,
    interval_shard,
    merge_intervals,
)
from meshwright_dtensor.sharding.states import State, States


def whole_block_states(
    shape: Sequence[int], sizes: Sequence[int], states: States, block: int
) -> tuple[States, States]:
    """The states of a value, and those of the list of its blocks, if every rank is to have whole blocks.

    They are `states`, without the shards of as few mesh axes as that needs (of those that leave a rank least).

    Args:
        shape: of the whole value, at least one element.
        sizes: of the mesh axes.
        block: elements of a block; the last one of a value may have fewer.
    """
    axes = [i for i, s in enumerate(states) if isinstance(s, int) and sizes[i] > 1]
    subsets = [kept for n in range(len(axes) + 1) for kept in itertools.combinations(axes, n)]
    for kept in sorted(subsets, key=lambda kept: -math.prod(sizes[i] for i in kept)):
        given = tuple("I" if i in axes and i not in kept else s for i, s in enumerate(states))
        of_blocks = _states_of_blocks(shape, sizes, given, kept, block)
        if of_blocks is not None:
            return given, of_blocks
    raise AssertionError("a value that no axis shards has whole blocks")


def _states_of_blocks(
    shape: Sequence[int], sizes: Sequence[int], states: States, axes: Sequence[int], block: int
) -> States | None:
    """The states of the list of blocks, of a value that only `axes` shard; None where a block is on several ranks."""
    of_blocks: list[State] = ["I"] * len(sizes)
    if not axes:
        return tuple(of_blocks)
    if any(int(states[i]) for i in axes):
        return None
    row, rows, even = math.prod(shape[1:]), shape[0], True
    for i in axes:
        state = int(states[i]) if not isinstance(states[i], IntervalShard) else states[i]
        # the chunks of an inner axis are not known where an outer one gives ranks different lengths
        if isinstance(state, IntervalShard) or even:
            held = state.intervals if isinstance(state, IntervalShard) else chunk_intervals(rows, sizes[i])
            in_blocks = [_in_blocks(intervals, row, block, rows) for intervals in held]
            if None in in_blocks:
                return None
            of_blocks[i] = interval_shard(0, [intervals for intervals in in_blocks if intervals is not None])
            lengths = [sum(length for _, length in intervals) for intervals in held]
            rows, even = lengths[0], even and len(set(lengths)) == 1
        else:
            of_blocks[i] = 0
    blocks = (-(-math.prod(shape) // block),)
    for coords in itertools.product(*(range(n if i in axes else 1) for i, n in enumerate(sizes))):
        mine = _in_blocks(region_of(shape, sizes, coords, states)[0], row, block, shape[0])
        if mine is None or region_of(blocks, sizes, coords, of_blocks)[0] != mine:
            return None
    return tuple(of_blocks)


def _in_blocks(intervals: Intervals, row: int, block: int, rows: int) -> Intervals | None:
    """Intervals of rows as intervals of blocks; None where a border is inside of a block, but for the last one of all rows."""
    scaled = []
    for place, (start, length) in enumerate(intervals):
        first, end = start * row, (start + length) * row
        last = start + length == rows and place == len(intervals) - 1
        if length and (first % block or (end % block and not last)):
            return None
        if length:
            scaled.append((first // block, -(-end // block) - first // block))
    return merge_intervals(scaled)
