"""The elements that a rank holds of a tensor, as places in the memory of the whole tensor, which is never made."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from meshwright_dtensor.sharding import boxes
from meshwright_dtensor.sharding.boxes import Box, Place

Tensor = torch.Tensor


def _copy(numbers: Tensor, result: Tensor) -> None:
    result.copy_(numbers)


@dataclass(frozen=True)
class Target:
    """Where a rank's numbers go.

    Attributes:
        tensors: of the rank's shape, the dims in the order of memory of the whole.
        put: called with numbers and the same part of each tensor.
    """

    tensors: tuple[Tensor, ...]
    put: Callable[..., None] = _copy

    def on(self, view: Callable[[Tensor], Tensor]) -> Target:
        """The same part of each tensor."""
        return Target(tuple(map(view, self.tensors)), self.put)


@dataclass(frozen=True)
class Held:
    """A part of a tensor that is dense in memory.

    Attributes:
        sizes: of the whole tensor, the dims in the order of memory, outermost first.
        parts: boxes of the whole tensor with their boxes in the rank's tensor, the dims in the same order; none is empty.
    """

    sizes: tuple[int, ...]
    parts: tuple[tuple[Box, Box], ...]

    @staticmethod
    def of(shape: Sequence[int], order: Sequence[int], place: Place) -> Held:
        """The `place` of a tensor of `shape` whose dims are in memory in this `order`."""
        parts = (
            (tuple(there[d] for d in order), tuple(here[d] for d in order))
            for there, here in boxes.region_boxes(place)
        )
        return Held(tuple(shape[d] for d in order), tuple(pair for pair in parts if boxes.box_numel(pair[0])))

    @property
    def total(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.sizes)

    @property
    def numel(self) -> int:
        """Elements that the rank holds."""
        return sum(boxes.box_numel(there) for there, _ in self.parts)

    def first_from(self, start: int) -> int | None:
        """The first element at or after `start`, in memory, that the rank holds; None if there is none."""
        firsts = (_first_from(self.sizes, there, start) for there, _ in self.parts)
        return min((at for at in firsts if at is not None), default=None)

    def put(self, target: Target, piece: Tensor, start: int) -> None:
        """Put what the rank holds of a `piece` of memory (1-dim, from `start` on) into its tensors."""
        for there, here in self.parts:
            _put(target.on(lambda t, here=here: boxes.slice_of(t, here)), piece, start, self.sizes, there)  # type: ignore[misc]

    def put_box(self, target: Target, numbers: Tensor, box: Box) -> None:
        """Put the numbers of a `box` of the rank's tensors, as `places` gives it."""
        part = target.on(lambda t: boxes.slice_of(t, box))
        part.put(numbers, *part.tensors)

    def places(self, most: int, device: torch.device) -> Iterator[tuple[Box, Tensor]]:
        """The part in blocks of at most about `most` elements: (box in the rank's tensor, place in memory of each element)."""
        for there, here in self.parts:
            for block in _blocks([length for _, length in there], most):
                at = torch.zeros((), dtype=torch.int64, device=device)
                for size, (first, _), (low, length) in zip(self.sizes, there, block, strict=True):
                    along = torch.arange(first + low, first + low + length, device=device)
                    at = at[..., None] * size + along
                local = tuple(
                    (first + low, length) for (first, _), (low, length) in zip(here, block, strict=True)
                )
                yield local, at


def _first_from(sizes: Sequence[int], box: Box, start: int) -> int | None:
    place, rest = [0] * len(sizes), start
    for dim in range(len(sizes) - 1, -1, -1):
        rest, place[dim] = divmod(rest, sizes[dim])
    if rest:
        return None
    for dim, (low, length) in enumerate(box):
        if low <= place[dim] < low + length:
            continue
        up = dim
        if place[dim] >= low + length:
            up = dim - 1
            while up >= 0 and place[up] + 1 >= sum(box[up]):
                up -= 1
            if up < 0:
                return None
            place[up] += 1
            up += 1
        place[up:] = [first for first, _ in box[up:]]
        break
    at = 0
    for size, coordinate in zip(sizes, place, strict=True):
        at = at * size + coordinate
    return at


def _put(target: Target, piece: Tensor, start: int, sizes: Sequence[int], box: Box) -> None:
    """Put the elements of `box` that are in `piece`: a part of a row at each end, and whole rows between them."""
    if not sizes:
        target.put(piece[0], *target.tensors)
        return
    end, (low, length), row = start + piece.numel(), box[0], math.prod(sizes[1:])
    begin = start
    while begin < end:
        number, inside = divmod(begin, row)
        rows = 0 if inside else (end - begin) // row
        stop = begin + rows * row if rows else min(end, (number + 1) * row)
        first, last = max(number, low), min(number + max(rows, 1), low + length)
        here = piece[begin - start : stop - start]
        if first < last and rows:
            inner = boxes.slice_of(here.view(rows, *sizes[1:]), ((first - number, last - first), *box[1:]))
            part = target.on(lambda t, at=first - low, n=last - first: t.narrow(0, at, n))  # type: ignore[misc]
            part.put(inner, *part.tensors)
        elif first < last:
            _put(target.on(lambda t, at=first - low: t[at]), here, inside, sizes[1:], box[1:])  # type: ignore[misc]
        begin = stop


def _blocks(lengths: Sequence[int], most: int) -> Iterator[Box]:
    """Boxes of a tensor of these lengths, of at most `most` elements each (one dim at least is cut to 1 otherwise)."""
    if not lengths:
        yield ()
        return
    row = math.prod(lengths[1:])
    step = max(most // max(row, 1), 1)
    for low in range(0, lengths[0], step):
        count = min(step, lengths[0] - low)
        for rest in _blocks(lengths[1:], most) if row > most else [boxes.whole_box(lengths[1:])]:
            yield ((low, count), *rest)
