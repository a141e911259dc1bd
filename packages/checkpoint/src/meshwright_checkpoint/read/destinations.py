"""What of stored parts goes where in the memory of this rank."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.read.plan import Stored, boxes_in_range, flat_range
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_dtensor.sharding.boxes import (
    Box,
    box_shape,
    intersect,
    relative_to,
    slice_of,
    whole_box,
)


@dataclass(frozen=True)
class Destination:
    """`box` of a part, which is a row-major array of `shape`, goes into `target`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    target: torch.Tensor

    def take(self, start: int, data: torch.Tensor) -> None:
        """Copy what is wanted out of `data`: the bytes of the part from `start` on."""
        aligned = (
            data.data_ptr() % self.dtype.itemsize == 0
        )  # it lies as in its file, and that may be of others
        values = (data if aligned else data.clone()).view(self.dtype)
        low = start // self.dtype.itemsize
        strides = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        for box in boxes_in_range(self.shape, self.box, low, low + values.numel()):
            first, _ = flat_range(self.shape, box)
            source = values[first - low :].as_strided(box_shape(box), strides)
            with torch.no_grad():
                slice_of(self.target, relative_to(box, self.box)).copy_(source)

    def straight(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The memory that these bytes of the part may be read right into, where all of them are wanted as they are stored."""
        low = start // self.dtype.itemsize
        boxes = boxes_in_range(self.shape, self.box, low, low + nbytes // self.dtype.itemsize)
        if len(boxes) > 1 or self.target.dtype != self.dtype or self.target.device.type != "cpu":
            return None
        there = slice_of(self.target, relative_to(boxes[0], self.box))
        if there.numel() * self.dtype.itemsize != nbytes or not there.is_contiguous():
            return None
        return there


@dataclass
class Part:
    """A part of a tensor of which this rank wants something; `sums`: the checksums of its blocks."""

    key: str
    sums: str
    targets: list[Destination]

    def straight(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The memory that these bytes may be read right into; None where several want them, or not as they are."""
        return self.targets[0].straight(start, nbytes) if len(self.targets) == 1 else None


def destinations_of(store: Store, wanted: Sequence[Wanted]) -> dict[Stored, Part]:
    """What is wanted, by where it is stored. Raises CorruptError where the same bytes shall have two checksums."""
    parts: dict[Stored, Part] = {}
    by_key: dict[str, list[Wanted]] = defaultdict(list)
    for want in wanted:
        by_key[want.key].append(want)
    for key, wants in by_key.items():
        source = store.tensors[key]
        for fragment in source.fragments:
            shape = box_shape(fragment.box)
            stored = Stored(fragment.file, fragment.offset, prod(shape) * source.dtype.itemsize)
            for want in wants:
                common = intersect(fragment.box, want.box) if want.box else ()
                if common is None:
                    continue
                target, box = (
                    slice_of(want.target, relative_to(common, want.box)),
                    relative_to(common, fragment.box),
                )
                part = parts.setdefault(stored, Part(key, fragment.sums, []))
                if part.sums != fragment.sums:
                    raise CorruptError(f"{store.where}: {key} and {part.key} lie in one place and differ")
                if shape and box[1:] == whole_box(shape[1:]) and target.is_contiguous():
                    # whole rows into whole rows: one run of memory
                    inner, (start, length) = prod(shape[1:]), box[0]
                    run = ((start * inner, length * inner),)
                    part.targets.append(Destination(source.dtype, (shape[0] * inner,), run, target.view(-1)))
                else:
                    part.targets.append(Destination(source.dtype, shape, box, target))
    return parts
