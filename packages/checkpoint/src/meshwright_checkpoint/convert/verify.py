"""Verify all checksums of a checkpoint; compare two checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.read.shared_read import CHUNK, read, reader_threads
from meshwright_checkpoint.read.wanted import Fragment, Source, Wanted
from meshwright_checkpoint.storage.checkpoint import Checkpoint
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.sharding.boxes import Box, box_numel, box_shape, whole_box

STEP_NBYTES = 64 << 20


def read_rows(checkpoint: Checkpoint, key: str, box: Box) -> Iterator[torch.Tensor]:
    """The values of a box of a stored tensor, in memory order: whole rows of about STEP_NBYTES, or one row, at a time."""
    dtype = checkpoint.tensors[key].dtype
    if not box_numel(box):
        return
    rows = max(STEP_NBYTES // (prod(box_shape(box[1:])) * dtype.itemsize), 1)
    start, length = box[0] if box else (0, 1)
    for at in range(0, length, rows):
        part = ((start + at, min(rows, length - at)), *box[1:]) if box else ()
        values = torch.empty(box_shape(part), dtype=dtype, device=HOST)
        read(checkpoint, [Wanted(key, part, values)])
        yield values


def verify(checkpoint: Checkpoint, progress: Callable[[int], None] = lambda nbytes: None) -> list[str]:
    """Read everything and verify all checksums. Returns one line per damage. `progress` is called with byte counts."""
    problems: list[str] = []

    def check(key: str, source: Source, fragment: Fragment) -> str | None:
        nbytes = prod(box_shape(fragment.box)) * source.dtype.itemsize
        buffer = bytearray(min(CHUNK, nbytes))
        try:
            file = checkpoint.file(fragment.file)
            for at in range(0, nbytes, CHUNK):
                view = memoryview(buffer)[: min(CHUNK, nbytes - at)]
                file.read_into(view, fragment.offset + at)
                first = at // BLOCK * DIGITS
                if block_sums(view) != fragment.sums[first : first + -(-len(view) // BLOCK) * DIGITS]:
                    return f"{key}: damaged in {file.where}, in the {len(view)} bytes from {fragment.offset + at} on"
                progress(len(view))
        except CorruptError as error:
            return f"{key}: {error}"
        return None

    # including files without tensors
    for file in checkpoint.manifest.files:
        try:
            checkpoint.file(file.name)
        except CorruptError as error:
            problems.append(str(error))
    if problems:
        return problems
    with ThreadPoolExecutor(reader_threads(1)) as pool:
        tensors = checkpoint.tensors.items()
        parts = [(key, source, part) for key, source in tensors for part in source.fragments]
        problems += [text for text in pool.map(lambda part: check(*part), parts) if text is not None]
    return problems


@dataclass(frozen=True)
class Difference:
    """One difference of two checkpoints; `kind` is "only in A", "only in B", "shape", "dtype", "values" or "about"."""

    name: str
    kind: str
    detail: str = ""


def compare(a: Checkpoint, b: Checkpoint) -> list[Difference]:
    """Compare two checkpoints, values bit for bit. Layouts (files, plans) are ignored. Raises CorruptError."""
    differences: list[Difference] = []
    for field in ("step", "optimizer", "extra", "model"):
        mine, theirs = (getattr(c.manifest, field) for c in (a, b))
        if mine != theirs:
            differences.append(Difference(field, "about", f"{mine} / {theirs}" if field == "step" else ""))
    for key in sorted({*a.tensors, *b.tensors}):
        if key not in b.tensors or key not in a.tensors:
            differences.append(Difference(key, "only in A" if key in a.tensors else "only in B"))
            continue
        left, right = a.tensors[key], b.tensors[key]
        if left.shape != right.shape:
            differences.append(Difference(key, "shape", f"{list(left.shape)} / {list(right.shape)}"))
        elif left.dtype != right.dtype:
            dtypes = f"{left.dtype} / {right.dtype}".replace("torch.", "")
            differences.append(Difference(key, "dtype", dtypes))
        else:
            count, largest = _unequal(a, b, key)
            if count:
                detail = f"{count} of {prod(left.shape)}, by up to {largest:.3g}"
                differences.append(Difference(key, "values", detail))
    return differences


def _unequal(a: Checkpoint, b: Checkpoint, key: str) -> tuple[int, float]:
    count, largest = 0, 0.0
    whole = whole_box(a.tensors[key].shape)
    for parts in zip(read_rows(a, key, whole), read_rows(b, key, whole), strict=True):
        if bytes(bytes_of_tensor(parts[0])) == bytes(bytes_of_tensor(parts[1])):
            continue
        wide = [part.to(torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        count += int((wide[0] != wide[1]).sum())
        largest = max(largest, float((wide[0] - wide[1]).abs().nan_to_num().max()))
    return count, largest
