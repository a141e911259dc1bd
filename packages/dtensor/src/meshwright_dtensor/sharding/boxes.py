"""Boxes and regions: which slices of a global tensor a rank holds.

A box is one (offset, length) pair per tensor dim, in elements of the global tensor. Layouts, random numbers, deferred
initialisation and resharding all use it. A region gives, per tensor dim, the intervals that the rank holds, in local order:
the product of the intervals is a list of boxes. Without an :class:`~meshwright_dtensor.sharding.intervals.IntervalShard` a
region is one box. This module imports no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.intervals import Interval as Interval
from meshwright_dtensor.sharding.intervals import Intervals, IntervalShard, intervals_of, merge_intervals

if TYPE_CHECKING:
    import torch

Ints: TypeAlias = Sequence[int]
Box: TypeAlias = tuple[Interval, ...]
Region: TypeAlias = tuple[Intervals, ...]
Place: TypeAlias = Box | Region


def shardable(size: int, n: int) -> bool:
    """Whether ``torch.chunk`` into ``n`` parts leaves no rank empty."""
    return size > 0 and (size % n == 0 or -(-size // n) * (n - 1) < size)


def whole_box(shape: Sequence[int]) -> Box:
    """The box of the whole tensor of `shape`."""
    return tuple((0, size) for size in shape)


def chunk_interval(interval: Interval, parts: int, index: int) -> Interval:
    """Part `index` of `interval` cut as `torch.chunk` cuts: `parts` of ceil(length / parts), the last ones short or empty."""
    offset, length = interval
    step = -(-length // parts)
    start = min(index * step, length)
    return offset + start, min(step, length - start)


def chunk_box(shape: Ints, mesh_sizes: Ints, coords: Ints, states: Sequence[str | int]) -> Box:
    """The box of the rank at `coords` of a mesh of `mesh_sizes`, for a tensor of global `shape`.

    `states` has one entry per mesh axis: an int cuts that tensor dim, anything else leaves it whole. Axes
    that cut the same dim nest, the earlier mesh axis outside (torch's order for `Shard`). Raises UsageError if
    entries do not fit, or the rank holds several boxes (`region_of` gives all of them).
    """
    if any(isinstance(state, IntervalShard) for state in states):
        interval_box = single_box(region_of(shape, mesh_sizes, coords, states))
        if interval_box is None:
            raise UsageError(
                f"a tensor in states {tuple(states)} is more than one box on the rank at {tuple(coords)}; "
                "use region_of and region_boxes (or Layout.region), which give all of them"
            )
        return interval_box
    check_axes(len(shape), mesh_sizes, coords, states)
    box = list(whole_box(shape))
    for parts, index, state in zip(mesh_sizes, coords, states, strict=True):
        if isinstance(state, int):
            box[state] = chunk_interval(box[state], parts, index)
    return tuple(box)


def check_axes(ndim: int, mesh_sizes: Ints, coords: Ints, states: Sequence[str | int]) -> None:
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
                f"state S({int(state)}) on mesh axis {axis} shards a dim that a {ndim}-dim tensor does not have; "
                f"use a dim in 0..{ndim - 1}"
                if ndim
                else f"state S({int(state)}) on mesh axis {axis} shards a 0-dim tensor; replicate it"
            )


def box_shape(box: Box) -> tuple[int, ...]:
    """The lengths: the shape of the local tensor."""
    return tuple(length for _, length in box)


def box_numel(box: Box) -> int:
    """The number of elements of the box (1 for a 0-dim tensor)."""
    return math.prod(box_shape(box))


def intersect(a: Box, b: Box) -> Box | None:
    """The box common to `a` and `b` (of one tensor), or None if they share no element."""
    if len(a) != len(b):
        text = f"boxes of {len(a)} and {len(b)} dims have no intersection; compare boxes of one tensor"
        raise UsageError(text)
    common = []
    for (start, length), (other, other_length) in zip(a, b, strict=True):
        low = max(start, other)
        high = min(start + length, other + other_length)
        if high <= low:
            return None
        common.append((low, high - low))
    return tuple(common)


def relative_to(inner: Box, outer: Box) -> Box:
    """`inner` in the coordinates of a tensor that holds `outer`."""
    return tuple((start - base, length) for (start, length), (base, _) in zip(inner, outer, strict=True))


def slice_of(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of `box` in the global `tensor`; no copy. Raises UsageError if the box does not fit."""
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

    A local dim of size 1 has the stride of the next longer dim outside of it. If strides tie, it is the inner one.
    """
    strides, sizes = tensor.stride(), tensor.shape
    return tuple(sorted(range(tensor.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1)))


@lru_cache(4096)
def dense_strides(shape: tuple[int, ...], dim_order: tuple[int, ...]) -> tuple[int, ...]:
    """The strides, in elements, of a dense tensor of `shape` with its dims in memory in `dim_order` (see `dim_order_of`)."""
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


def has_gaps(tensor: torch.Tensor, shape: tuple[int, ...], dim_order: tuple[int, ...] | None = None) -> bool:
    """Whether this part of a tensor of `shape` shows that the whole is not dense: a view of a larger one, or expanded.

    Random operations then draw other numbers. A part without gaps of its own is dense, or a slice of a dense whole.
    """
    order, held = dim_order_of(tensor) if dim_order is None else dim_order, tensor.stride()
    # the stride of a dim of size 1 means something only in a view: results keep those of their inputs
    all_of_storage = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    sizes = tensor.shape if all_of_storage else shape
    return not any(
        all(a == b or size == 1 for a, b, size in zip(held, dense_strides(whole, order), sizes, strict=True))
        for whole in (tuple(tensor.shape), shape)
    )


def strides_of(shape: tuple[int, ...], dim_order: tuple[int, ...], gaps: bool) -> tuple[int, ...]:
    """As `dense_strides`; with `gaps`, every second element is the tensor's own."""
    strides = dense_strides(shape, dim_order)
    return tuple(2 * stride for stride in strides) if gaps else strides


def region_of(shape: Ints, mesh_sizes: Ints, coords: Ints, states: Sequence[str | int]) -> Region:
    """The region of the rank at `coords` of a mesh of `mesh_sizes`, for a tensor of global `shape`.

    Arguments and nesting as in `chunk_box`, and interval shards. Raises UsageError for entries that do not fit.
    """
    check_axes(len(shape), mesh_sizes, coords, states)
    region: list[Intervals] = [((0, size),) for size in shape]
    for parts, index, state in zip(mesh_sizes, coords, states, strict=True):
        if not isinstance(state, int):
            continue
        held = region[int(state)]
        try:
            rank_intervals = intervals_of(state, sum(length for _, length in held), parts)[index]
        except ValueError as error:
            raise UsageError(
                f"{error}; an interval shard fits one size of dim: make it for this size with "
                "interval_shard() or segmented_shard()"
            ) from None
        region[int(state)] = merge_intervals(
            [piece for interval in rank_intervals for piece in cut_intervals(held, *interval)]
        )
    return tuple(region)


def cut_intervals(held: Intervals, start: int, length: int) -> Iterator[Interval]:
    """The intervals of `held` from local position `start` on, for `length` elements."""
    position = 0
    for offset, size in held:
        low, high = max(start, position), min(start + length, position + size)
        if low < high:
            yield offset + low - position, high - low
        position += size


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(sum(length for _, length in intervals) for intervals in region)


def place_shape(place: Place) -> tuple[int, ...]:
    """The shape of the local tensor of a box or a region."""
    box = single_box(place)
    return region_shape(place) if box is None else box_shape(box)  # type: ignore[arg-type]


def local_shape_of(
    shape: Ints, mesh_sizes: Ints, coords: Ints, states: Sequence[str | int]
) -> tuple[int, ...]:
    """The shape of the local tensor at `coords`; arguments as in `region_of`."""
    return region_shape(region_of(shape, mesh_sizes, coords, states))


def single_box(place: Place) -> Box | None:
    """The box if `place` is one box, else None."""
    box = []
    for intervals in place:
        if not isinstance(intervals[0], tuple):
            return place  # type: ignore[return-value]
        if len(intervals) > 1:
            return None
        box.append(intervals[0])
    return tuple(box)  # type: ignore[arg-type]


def region_boxes(place: Place) -> list[tuple[Box, Box]]:
    """The boxes of `place` that are not empty, as checkpoints read and write them: (in the global tensor, in the local tensor)."""
    spans = []
    for dim in place:
        intervals: Intervals = dim if isinstance(dim[0], tuple) else (dim,)  # type: ignore[assignment]
        starts = itertools.accumulate((length for _, length in intervals), initial=0)
        only = len(intervals) == 1
        spans.append([((a, n), (at, n)) for (a, n), at in zip(intervals, starts) if n or only])
    return [
        (tuple(globally for globally, _ in pairs), tuple(locally for _, locally in pairs))
        for pairs in itertools.product(*spans)
    ]


def read_region(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """`place` of the global `tensor`: a view if it is one box, else a dense copy in the memory order of `tensor`."""
    box = single_box(place)
    return copy_region(tensor, place) if box is None else slice_of(tensor, box)


def copy_region(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """A dense copy of `place` of the global `tensor`, with the memory order of `tensor`."""
    shape = place_shape(place)
    result = tensor.new_empty_strided(shape, dense_strides(shape, dim_order_of(tensor)))
    for global_box, local_box in region_boxes(place):
        slice_of(result, local_box).copy_(slice_of(tensor, global_box))
    return result


def write_region(tensor: torch.Tensor, place: Place, value: torch.Tensor) -> None:
    """Write the local tensor `value` to `place` of the global `tensor`."""
    for global_box, local_box in region_boxes(place):
        slice_of(tensor, global_box).copy_(slice_of(value, local_box))


def uneven_dims(shape: Sequence[int], sizes: Sequence[int], states: Sequence[str | int]) -> set[int]:
    """The dims whose local size differs between ranks."""
    uneven: set[int] = set()
    local_shape = list(shape)
    for n, state in zip(sizes, states, strict=True):
        if not isinstance(state, int):
            continue
        dim, size = int(state), local_shape[int(state)]
        if isinstance(state, IntervalShard):
            even, local_shape[dim] = state.even, state.lengths[0]
        else:
            even, local_shape[dim] = size % n == 0, -(-size // n)
        if not even:
            uneven.add(dim)
    return uneven
