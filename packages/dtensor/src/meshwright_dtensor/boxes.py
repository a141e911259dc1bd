"""Boxes: which slice of which global tensor a rank holds.

A box is one (offset, length) pair per tensor dim, in elements of the global tensor. It is the one notion of
position that layouts, random numbers, deferred initialisation and resharding share. This module imports no
torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.runs import Interval as Interval
from meshwright_dtensor.runs import Runs

if TYPE_CHECKING:
    import torch

Box: TypeAlias = tuple[Interval, ...]


def whole_box(shape: Sequence[int]) -> Box:
    """The box of the whole tensor of `shape`."""
    return tuple((0, size) for size in shape)


def chunk_interval(interval: Interval, parts: int, index: int) -> Interval:
    """Part `index` of `interval` cut into `parts` as `torch.chunk` cuts: equal parts of ceil(length / parts),
    the last ones short or empty.
    """
    offset, length = interval
    step = -(-length // parts)
    start = min(index * step, length)
    return offset + start, min(step, length - start)


def chunk_box(
    shape: Sequence[int], mesh_sizes: Sequence[int], coords: Sequence[int], states: Sequence[str | int]
) -> Box:
    """The box of the rank at `coords` of a mesh of `mesh_sizes`, for a tensor of global `shape`.

    `states` has one entry per mesh axis: an int cuts that tensor dim, anything else leaves it whole. Axes
    that cut the same dim nest, the earlier mesh axis outside (torch's order for `Shard`). Raises UsageError
    for entries that do not fit, and for Runs that leave the rank several boxes (`regions.region_of` takes those).
    """
    if any(isinstance(state, Runs) for state in states):
        from meshwright_dtensor.regions import region_of, single_box

        box_of_runs = single_box(region_of(shape, mesh_sizes, coords, states))
        if box_of_runs is None:
            raise UsageError(
                f"a tensor in states {tuple(states)} is more than one box on the rank at {tuple(coords)}; "
                "use region_of and region_boxes (or Layout.region), which give all of them"
            )
        return box_of_runs
    check_axes(len(shape), mesh_sizes, coords, states)
    box = list(whole_box(shape))
    for parts, index, state in zip(mesh_sizes, coords, states, strict=True):
        if isinstance(state, int):
            box[state] = chunk_interval(box[state], parts, index)
    return tuple(box)


def check_axes(
    ndim: int, mesh_sizes: Sequence[int], coords: Sequence[int], states: Sequence[str | int]
) -> None:
    """Raise UsageError unless there is one size, coordinate and state per mesh axis, and shards name a dim."""
    if not len(mesh_sizes) == len(coords) == len(states):
        raise UsageError(
            f"{len(mesh_sizes)} mesh sizes, {len(coords)} coordinates and {len(states)} states: "
            "give one of each per mesh axis"
        )
    for axis, (parts, index, state) in enumerate(zip(mesh_sizes, coords, states, strict=True)):
        if not 0 <= index < parts:
            raise UsageError(
                f"coordinate {index} on mesh axis {axis} is outside 0..{parts - 1}; "
                "use the rank's own coordinate"
            )
        if isinstance(state, int) and not 0 <= int(state) < ndim:
            raise UsageError(
                f"state S({int(state)}) on mesh axis {axis} shards a dim that a {ndim}-dim tensor has not; "
                f"use a dim in 0..{ndim - 1}"
                if ndim
                else f"state S({int(state)}) on mesh axis {axis} shards a tensor without dims; replicate it"
            )


def box_shape(box: Box) -> tuple[int, ...]:
    """The lengths: the shape of the local tensor."""
    return tuple(length for _, length in box)


def box_numel(box: Box) -> int:
    """How many elements the box holds (1 for a tensor without dims)."""
    count = 1
    for _, length in box:
        count *= length
    return count


def intersect(a: Box, b: Box) -> Box | None:
    """The box common to `a` and `b` (of one tensor), or None if they share no element."""
    if len(a) != len(b):
        raise UsageError(
            f"boxes of {len(a)} and {len(b)} dims have no intersection; compare boxes of one tensor"
        )
    common = []
    for (start, length), (other, other_length) in zip(a, b, strict=True):
        low = max(start, other)
        high = min(start + length, other + other_length)
        if high <= low:
            return None
        common.append((low, high - low))
    return tuple(common)


def relative_to(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of a tensor that holds `outer`: where to write what was read."""
    return tuple((start - base, length) for (start, length), (base, _) in zip(inner, outer, strict=True))


def slice_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of the global `tensor` that `box` names; no copy. Raises UsageError if the box does not fit."""
    if tensor.dim() != len(box) or any(
        start + length > size for (start, length), size in zip(box, tensor.shape, strict=True)
    ):
        raise UsageError(
            f"box {box} does not fit a tensor of shape {tuple(tensor.shape)}; "
            "use the box of this tensor's own layout"
        )
    for dim, (start, length) in enumerate(box):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, start, length)
    return tensor


def dim_order_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The dims by decreasing stride, outermost in memory first.

    A dim of which a rank holds one element has the stride of the next longer dim outside of it: where strides tie, it
    lies inside.
    """
    strides, sizes = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1)))


def dense_strides(shape: Sequence[int], dim_order: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a tensor of `shape` without holes whose dims lie in memory as `dim_order`
    says.
    """
    return _dense_strides(tuple(shape), tuple(dim_order))


@lru_cache(4096)
def _dense_strides(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> tuple[int, ...]:
    if sorted(dim_order) != list(range(len(shape))):
        raise UsageError(
            f"dim_order {tuple(dim_order)} does not name each dim of shape {tuple(shape)} once; "
            f"for a contiguous tensor it is {tuple(range(len(shape)))}"
        )
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(dim_order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)
