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
from meshwright_dtensor.sharding.boxes import Box, box_shape, whole_box

STEP_NBYTES = 64 << 20


def row_blocks(source: Source) -> Iterator[Box]:
    """Boxes of whole rows that tile a tensor in memory order, each of about STEP_NBYTES or one row."""
    if not source.shape:
        yield ()
    if not source.shape or not source.nbytes:
        return
    rows = max(STEP_NBYTES // max(prod(source.shape[1:]) * source.dtype.itemsize, 1), 1)
    for start in range(0, source.shape[0], rows):
        yield ((start, min(rows, source.shape[0] - start)), *whole_box(source.shape[1:]))


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
        waiting = [
            pool.submit(check, key, source, fragment)
            for key, source in checkpoint.tensors.items()
            for fragment in source.fragments
        ]
        problems += [text for future in waiting if (text := future.result()) is not None]
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
            short = f"{mine} / {theirs}" if field == "step" else ""
            differences.append(Difference(field, "about", short))
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
    for box in row_blocks(a.tensors[key]):
        parts = [torch.empty(box_shape(box), dtype=a.tensors[key].dtype) for _ in range(2)]
        for checkpoint, part in zip((a, b), parts, strict=True):
            read(checkpoint, [Wanted(key, box, part)])
        if bytes(bytes_of_tensor(parts[0])) == bytes(bytes_of_tensor(parts[1])):
            continue
        wide = [part.to(torch.complex128 if part.is_complex() else torch.float64) for part in parts]
        count += int((wide[0] != wide[1]).sum())
        largest = max(largest, float((wide[0] - wide[1]).abs().nan_to_num().max()))
    return count, largest
