"""Destinations of a read: which part of the stored bytes goes where in this rank's memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.read.read_plan import StoredRange, boxes_in_range, flat_range
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.sharding.boxes import Box, box_shape, intersect, relative_to, slice_of, whole_box


@dataclass(frozen=True)
class Destination:
    """Copy of `box` of a stored part, a row-major array of `shape`, into `target`."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    box: Box
    target: torch.Tensor

    def copy_from(self, start: int, data: torch.Tensor) -> None:
        """Copy the elements of the box that are in `data`: the bytes of the part from `start` on."""
        # files of other programs may place tensors at any offset
        aligned = data.data_ptr() % self.dtype.itemsize == 0
        values = (data if aligned else data.clone()).view(self.dtype)
        low = start // self.dtype.itemsize
        strides = [prod(self.shape[d + 1 :]) for d in range(len(self.shape))]
        for box in boxes_in_range(self.shape, self.box, low, low + values.numel()):
            first, _ = flat_range(self.shape, box)
            source = values[first - low :].as_strided(box_shape(box), strides)
            with torch.no_grad():
                slice_of(self.target, relative_to(box, self.box)).copy_(source)

    def contiguous_view(self, start: int, nbytes: int) -> torch.Tensor | None:
        """The part of `target` that equals these bytes of the stored part, to read into directly; None if there is none."""
        low = start // self.dtype.itemsize
        boxes = boxes_in_range(self.shape, self.box, low, low + nbytes // self.dtype.itemsize)
        if len(boxes) > 1 or self.target.dtype != self.dtype or not on_host(self.target.device):
            return None
        there = slice_of(self.target, relative_to(boxes[0], self.box))
        return there if there.nbytes == nbytes and there.is_contiguous() else None


@dataclass
class StoredPart:
    """A stored part that this rank reads from. `sums`: the checksums of its blocks."""

    key: str
    sums: str
    destinations: list[Destination]

    def contiguous_view(self, start: int, nbytes: int) -> torch.Tensor | None:
        """See `Destination.contiguous_view`; None if there are several destinations."""
        return self.destinations[0].contiguous_view(start, nbytes) if len(self.destinations) == 1 else None


def destinations_of(store: Store, wanted: Sequence[Wanted]) -> dict[StoredRange, StoredPart]:
    """Group the wanted boxes by stored part. Raises CorruptError if one byte range has two different checksums."""
    parts: dict[StoredRange, StoredPart] = {}
    by_key: dict[str, list[Wanted]] = defaultdict(list)
    for want in wanted:
        by_key[want.key].append(want)
    for key, wants in by_key.items():
        source = store.tensors[key]
        for fragment in source.fragments:
            shape = box_shape(fragment.box)
            stored = StoredRange(fragment.file, fragment.offset, prod(shape) * source.dtype.itemsize)
            for want in wants:
                common = intersect(fragment.box, want.box) if want.box else ()
                if common is None:
                    continue
                target = slice_of(want.target, relative_to(common, want.box))
                box = relative_to(common, fragment.box)
                part = parts.setdefault(stored, StoredPart(key, fragment.sums, []))
                if part.sums != fragment.sums:
                    text = f"{store.where}: {key} and {part.key} are stored at the same place with different checksums"
                    raise CorruptError(text)
                if shape and box[1:] == whole_box(shape[1:]) and target.is_contiguous():
                    # whole rows into whole rows: one contiguous copy
                    inner, (start, length) = prod(shape[1:]), box[0]
                    run = ((start * inner, length * inner),)
                    made = Destination(source.dtype, (prod(shape),), run, target.view(-1))
                else:
                    made = Destination(source.dtype, shape, box, target)
                part.destinations.append(made)
    return parts
