"""Regions: what a rank holds of a global tensor where that is more than one box.

A region gives, per tensor dim, the intervals that the rank owns, in the order in which they lie in its local tensor: the
product of the intervals are boxes.  A layout without :class:`~meshwright_dtensor.runs.Runs` has regions of one box.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

from meshwright_dtensor.boxes import Box, box_shape, check_axes, dense_strides, dim_order_of, slice_of
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.runs import Interval, Intervals, Runs, intervals_of, merged

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
