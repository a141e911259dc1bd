"""Read plan: all wanted bytes, every block once, shared evenly."""

from __future__ import annotations

from itertools import pairwise
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright_checkpoint.format.checksum import BLOCK
from meshwright_checkpoint.read.read_plan import (
    StoredRange,
    boxes_in_range,
    flat_range,
    plan_reads,
    wanted_ranges,
)
from meshwright_dtensor.sharding.boxes import Box

STEP = 2 * BLOCK


@st.composite
def boxed(draw: st.DrawFn, sizes: st.SearchStrategy[int], dims: int = 3) -> tuple[list[int], Box]:
    shape = draw(st.lists(sizes, max_size=dims))
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    return shape, tuple((at, draw(st.integers(1, n - at))) for at, n in zip(starts, shape, strict=True))


def cut(array: np.ndarray, box: Box) -> np.ndarray:
    return array[tuple(slice(start, start + length) for start, length in box)].ravel()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(shape_and_box=boxed(st.integers(1, 5)), data=st.data())
def test_boxes_in_range_cover_a_flat_range(shape_and_box: tuple[list[int], Box], data: st.DataObject) -> None:
    shape, box = shape_and_box
    low = data.draw(st.integers(0, prod(shape)))
    high = data.draw(st.integers(low, prod(shape)))
    numbers = np.arange(prod(shape)).reshape(shape)
    parts = [cut(numbers, part) for part in boxes_in_range(shape, box, low, high)]
    wanted = [x for x in cut(numbers, box) if low <= x < high]
    assert [int(x) for part in parts for x in part] == wanted
    whole = cut(numbers, box)
    assert flat_range(shape, box) == (whole[0], whole[-1] + 1)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(shape=st.lists(st.integers(1, 130), min_size=3, max_size=3), data=st.data())
def test_read_plan_reads_every_block_once(shape: list[int], data: st.DataObject) -> None:
    itemsize = data.draw(st.sampled_from([1, 2, 8]))
    numbers = np.arange(prod(shape)).reshape(shape)
    boxes = []
    for _ in range(data.draw(st.integers(1, 4))):
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        boxes.append(
            tuple((at, data.draw(st.integers(1, n - at))) for at, n in zip(starts, shape, strict=True))
        )
    stored = StoredRange("f", 4096, prod(shape) * itemsize)
    plan = plan_reads([{stored: list(wanted_ranges(shape, itemsize, box, STEP))} for box in boxes], STEP)
    ranges = sorted((p.start, p.start + p.nbytes) for p in plan)
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    for p in plan:
        assert p.start % BLOCK == 0 and p.nbytes <= STEP and p.reader in p.consumers
        assert (p.start + p.nbytes) % BLOCK == 0 or p.start + p.nbytes == stored.nbytes
    for member, box in enumerate(boxes):
        there = cut(numbers, box)
        taken: list[int] = []
        for p in plan:
            if member in p.consumers:
                parts = boxes_in_range(shape, box, p.start // itemsize, (p.start + p.nbytes) // itemsize)
                taken += [int(x) for part in parts for x in cut(numbers, part)]
        assert sorted(taken) == there.tolist()


def test_read_plan_balances_shared_chunks() -> None:
    stored = [StoredRange("f", at * 40 * BLOCK, 40 * BLOCK) for at in range(3)]
    all_of_it = [(at * STEP, (at + 1) * STEP) for at in range(20)]
    wants = [{stored[0]: all_of_it, stored[1]: all_of_it}, {stored[1]: all_of_it}, {stored[1]: all_of_it}]
    loads = [0, 0, 0]
    for p in plan_reads(wants, STEP):
        assert p.consumers == ((0,) if p.stored == stored[0] else (0, 1, 2))
        loads[p.reader] += p.nbytes
    assert loads == [
        40 * BLOCK,
        20 * BLOCK,
        20 * BLOCK,
    ]  # member 0 has its own chunks, so it reads none for others
