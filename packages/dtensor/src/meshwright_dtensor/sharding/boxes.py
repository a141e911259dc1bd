"""Boxes: which slice of which global tensor a rank holds.

A box is one (offset, length) pair per tensor dim, in elements of the global tensor. It is the one notion of
position that layouts, random numbers, deferred initialisation and resharding share. This module imports no
torch.


Regions: what a rank holds of a global tensor where that is more than one box.

A region gives, per tensor dim, the intervals that the rank owns, in the order in which they lie in its local tensor: the
product of the intervals are boxes.  A layout without :class:`~meshwright_dtensor.sharding.intervals.Runs` has regions of one box.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, TypeAlias

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.sharding.intervals import Interval as Interval
from meshwright_dtensor.sharding.intervals import Intervals, Runs, intervals_of, merged

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
        pass

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


if TYPE_CHECKING:
    import torch

Region: TypeAlias = tuple[Intervals, ...]
Place: TypeAlias = Box | Region
"""A box, or the region of a rank that holds several."""


def region_of(
    shape: Sequence[int], mesh_sizes: Sequence[int], coords: Sequence[int], states: Sequence[str | int]
) -> Region:
    """The region of the rank at `coords` of a mesh of `mesh_sizes`, for a tensor of global `shape`.

    Arguments and nesting as in `chunk_box`, with Runs allowed. Raises UsageError for entries that do not fit.
    """
    check_axes(len(shape), mesh_sizes, coords, states)
    region: list[Intervals] = [((0, size),) for size in shape]
    for parts, index, state in zip(mesh_sizes, coords, states, strict=True):
        if not isinstance(state, int):
            continue
        held = region[int(state)]
        try:
            own = intervals_of(state, sum(length for _, length in held), parts)[index]
        except ValueError as error:
            raise UsageError(
                f"{error}; runs fit one size of dim: make them anew with runs() or segments()"
            ) from None
        region[int(state)] = merged([piece for interval in own for piece in _cut(held, *interval)])
    return tuple(region)


def _cut(held: Intervals, start: int, length: int) -> Iterator[Interval]:
    """The part `start .. start + length` (in local order) of what is held."""
    at = 0
    for offset, size in held:
        low, high = max(start, at), min(start + length, at + size)
        if low < high:
            yield offset + low - at, high - low
        at += size


def region_shape(region: Region) -> tuple[int, ...]:
    """The shape of the local tensor."""
    return tuple(sum(length for _, length in own) for own in region)


def local_shape_of(
    shape: Sequence[int], mesh_sizes: Sequence[int], coords: Sequence[int], states: Sequence[str | int]
) -> tuple[int, ...]:
    """The shape of what the rank at `coords` holds; arguments as in `region_of`."""
    return region_shape(region_of(shape, mesh_sizes, coords, states))


def _shape(place: Place) -> tuple[int, ...]:
    box = single_box(place)
    return region_shape(place) if box is None else box_shape(box)  # type: ignore[arg-type]


def single_box(place: Place) -> Box | None:
    """The box of a place that is one, else None."""
    box = []
    for own in place:
        if not isinstance(own[0], tuple):
            return place  # type: ignore[return-value]
        if len(own) > 1:
            return None
        box.append(own[0])
    return tuple(box)  # type: ignore[arg-type]


def region_boxes(place: Place) -> list[tuple[Box, Box]]:
    """Every box of a place that holds something: (in the global tensor, in the local tensor).

    What a checkpoint writes, and reads into, for this rank.
    """
    spans = []
    for own in place:
        intervals: Intervals = own if isinstance(own[0], tuple) else (own,)  # type: ignore[assignment]
        starts = itertools.accumulate((length for _, length in intervals), initial=0)
        spans.append(
            [
                ((a, n), (at, n))
                for (a, n), at in zip(intervals, starts, strict=False)
                if n or len(intervals) == 1
            ]
        )
    return [
        (tuple(there for there, _ in pairs), tuple(here for _, here in pairs))
        for pairs in itertools.product(*spans)
    ]


def take(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """What `place` names of the global `tensor`: a view where it is one box, else a dense copy in the memory order of
    `tensor`.
    """
    box = single_box(place)
    return copy_of(tensor, place) if box is None else slice_of(tensor, box)


def copy_of(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """A copy of what `place` names of the global `tensor`, without holes, its dims in memory as in `tensor`."""
    boxes = region_boxes(place)
    shape = _shape(place)
    result = tensor.new_empty_strided(shape, dense_strides(shape, dim_order_of(tensor)))
    for there, here in boxes:
        slice_of(result, here).copy_(slice_of(tensor, there))
    return result


def put(tensor: torch.Tensor, place: Place, value: torch.Tensor) -> None:
    """Write `value`, a local tensor, where `place` names it in the global `tensor`."""
    for there, here in region_boxes(place):
        slice_of(tensor, there).copy_(slice_of(value, here))


def uneven_dims(shape: Sequence[int], sizes: Sequence[int], states: Sequence[str | int]) -> set[int]:
    """The dims that ranks own unequal parts of."""
    uneven: set[int] = set()
    left = list(shape)
    for n, state in zip(sizes, states, strict=True):
        if not isinstance(state, int):
            continue
        dim = int(state)
        if isinstance(state, Runs):
            if not state.even:
                uneven.add(dim)
            left[dim] = state.lengths[0]
        else:
            if left[dim] % n:
                uneven.add(dim)
            left[dim] = -(-left[dim] // n)
    return uneven
