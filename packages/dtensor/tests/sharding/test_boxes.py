"""Boxes tile their tensor, and are torch's own for `Shard` placements."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.boxes import (
    Box,
    box_numel,
    box_shape,
    chunk_box,
    chunk_interval,
    has_gaps,
    intersect,
    relative_to,
    slice_of,
    whole_box,
)
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import fake_group

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...], tuple[str | int, ...]]:
    shape = tuple(draw(st.lists(st.integers(0, 11), min_size=1, max_size=3)))
    mesh = draw(MESHES)
    states = tuple(draw(st.sampled_from(["I", "X", "P", *range(len(shape))])) for _ in mesh)
    return shape, mesh, states


def all_boxes(shape: tuple[int, ...], mesh: tuple[int, ...], states: tuple[str | int, ...]) -> list[Box]:
    return [
        chunk_box(shape, mesh, coords, states)
        for coords in itertools.product(*(range(size) for size in mesh))
    ]


@given(layouts())
def test_the_boxes_of_all_ranks_tile_the_tensor(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[str | int, ...]],
) -> None:
    shape, mesh, states = layout
    count = torch.zeros(shape, dtype=torch.int64)
    for box in all_boxes(shape, mesh, states):
        slice_of(count, box).add_(1)
    copies = math.prod(size for size, state in zip(mesh, states, strict=True) if not isinstance(state, int))
    assert torch.equal(count, torch.full(shape, copies))


@given(layouts())
def test_nesting_is_chunking_again(
    layout: tuple[tuple[int, ...], tuple[int, ...], tuple[str | int, ...]],
) -> None:
    shape, mesh, states = layout
    value = torch.arange(math.prod(shape)).reshape(shape)
    for coords in itertools.product(*(range(size) for size in mesh)):
        want = value
        for size, index, state in zip(mesh, coords, states, strict=True):
            if isinstance(state, int):
                chunks = want.chunk(size, state)
                want = chunks[index] if index < len(chunks) else want.narrow(state, 0, 0)
        box = chunk_box(shape, mesh, coords, states)
        assert torch.equal(slice_of(value, box), want)
        assert box_shape(box) == want.shape
        assert box_numel(box) == want.numel()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_boxes_are_torchs_for_shard_placements(data: st.DataObject) -> None:
    mesh_sizes = data.draw(MESHES)
    shape = tuple(data.draw(st.lists(st.integers(1, 13), min_size=1, max_size=3)))
    states = [data.draw(st.sampled_from(["I", *range(len(shape))])) for _ in mesh_sizes]
    rank = data.draw(st.integers(0, math.prod(mesh_sizes) - 1))
    placements = [Shard(state) if isinstance(state, int) else Replicate() for state in states]
    with fake_group(math.prod(mesh_sizes), rank):
        mesh = init_device_mesh(device_type(), mesh_sizes)
        local, offset = compute_local_shape_and_global_offset(torch.Size(shape), mesh, placements)
        coords = mesh.get_coordinate()
    assert coords is not None
    box = chunk_box(shape, mesh_sizes, coords, states)
    assert box_shape(box) == tuple(local)
    if box_numel(box):  # the offset of an empty box has no meaning
        assert tuple(start for start, _ in box) == tuple(offset)


@given(st.data())
def test_intersections_are_the_common_elements(data: st.DataObject) -> None:
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))

    def some_box() -> Box:
        starts = [data.draw(st.integers(0, size - 1)) for size in shape]
        return tuple(
            (start, data.draw(st.integers(0, size - start)))
            for start, size in zip(starts, shape, strict=True)
        )

    a, b = some_box(), some_box()
    marks = torch.zeros(shape, dtype=torch.int64)
    slice_of(marks, a).add_(1)
    slice_of(marks, b).add_(1)
    common = intersect(a, b)
    assert common == intersect(b, a)
    if common is None:
        assert not (marks == 2).any()
        return
    assert int((marks == 2).sum()) == box_numel(common)
    assert bool((slice_of(marks, common) == 2).all())
    value = torch.rand(shape)
    assert torch.equal(slice_of(slice_of(value, a), relative_to(common, a)), slice_of(value, common))


def test_known_boxes() -> None:
    assert whole_box((3, 2)) == ((0, 3), (0, 2))
    assert [chunk_interval((0, 5), 4, index) for index in range(4)] == [(0, 2), (2, 2), (4, 1), (5, 0)]
    assert chunk_box((8, 6), (2, 2), (1, 0), (0, 0)) == ((4, 2), (0, 6))
    assert chunk_box((8, 6), (2, 2), (0, 1), (0, 0)) == ((2, 2), (0, 6))
    assert chunk_box((), (2,), (1,), ("X",)) == ()
    assert box_numel(()) == 1
    assert intersect(((0, 2),), ((2, 2),)) is None


def test_a_slice_is_a_view() -> None:
    value = torch.zeros(4, 4)
    slice_of(value, ((1, 2), (0, 4))).fill_(1)
    assert value.sum() == 8
    assert slice_of(value, whole_box((4, 4))) is value


def test_arguments_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(UsageError, match="one of each per mesh axis"):
        chunk_box((4,), (2, 2), (0,), (0, 0))
    with pytest.raises(UsageError, match=r"coordinate 2 on mesh axis 0 is outside 0..1"):
        chunk_box((4,), (2,), (2,), (0,))
    with pytest.raises(UsageError, match=r"S\(1\) on mesh axis 0"):
        chunk_box((4,), (2,), (0,), (1,))
    with pytest.raises(UsageError, match="0-dim tensor"):
        chunk_box((), (2,), (0,), (0,))
    with pytest.raises(UsageError, match="does not fit"):
        slice_of(torch.zeros(3), ((2, 2),))
    with pytest.raises(UsageError, match="does not fit"):
        slice_of(torch.zeros(3), ((0, 1), (0, 1)))
    with pytest.raises(UsageError, match="of 1 and 2 dims"):
        intersect(((0, 1),), ((0, 1), (0, 1)))


def test_boxes_need_no_torch() -> None:
    code = "import sys, meshwright_dtensor.sharding.boxes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@given(
    st.permutations([0, 1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 4]),
    st.integers(0, 2),
    st.integers(1, 2),
)
def test_parts_show_the_gaps_of_the_whole(
    order: list[int], step: int, rows: int, dim: int, ranks: int
) -> None:
    whole = torch.empty(rows, 6, 8).permute(order)[..., ::step]
    dense = torch.empty_like(whole).stride() == whole.stride()
    part = whole.chunk(ranks, dim)[0]
    assert has_gaps(part, tuple(whole.shape)) == (not dense)
    # a part of its own memory shows none
    assert not has_gaps(part.clone(), tuple(whole.shape))
    assert has_gaps(torch.empty(1, 2, 3).expand(4, 2, 3), (4, 2, 3))
