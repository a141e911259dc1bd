"""Read any box of any tensor of a checkpoint into memory: only the blocks that are needed, each one checked."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.errors import CorruptError
from meshwright_dtensor.boxes import Box, box_shape, intersect, relative_to, slice_of
from meshwright_dtensor.cores import usable_cores


def _local_ranks() -> int:
    """How many ranks a launcher says it has started on this machine."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(int(text), 1) if text.isdigit() else 1


CHUNK = 16 * BLOCK
"""Bytes read at a time by one thread."""
THREADS = max(2, min(4, usable_cores() // _local_ranks()))
"""That read at once: as many as the ranks of this machine leave cores to each."""


class ReadFile(Protocol):
    """A file that parts are read of, from several threads at once."""

    where: str
    nbytes: int

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset`; CorruptError where that is not possible."""

    def close(self) -> None:
        """Close."""


@dataclass(frozen=True)
class Fragment:
    """Bytes in a file that are a box of a tensor, row-major.

    box: of the whole tensor.
    file: name of the file.
    offset: in bytes.
    sums: checksums of its blocks; "" where there are none (files of others).
    """

    box: Box
    file: str
    offset: int
    sums: str = ""


@dataclass(frozen=True)
class Source:
    """A stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    fragments: tuple[Fragment, ...]


class Store(Protocol):
    """What tensors are read from: a checkpoint of ours, or a directory of `from_pretrained`."""

    where: str

    @property
    def tensors(self) -> Mapping[str, Source]:
        """By key."""

    def file(self, name: str) -> ReadFile:
        """An open file, whose header has been checked."""


@dataclass(frozen=True)
class Wanted:
    """A box of tensor `key` that shall be written to `target`, a view of its shape; a dtype of its own means a cast."""

    key: str
    box: Box
    target: torch.Tensor


def read(store: Store, wanted: Sequence[Wanted], turn: float = 0.0) -> None:
    """Fill every target. `turn`, from 0 to 1, is where in the order of files to begin: ranks of one machine that read the same
    files begin at different ones, and find in memory what another has read.

    Extra memory: a buffer of `CHUNK` and a little more for each of `THREADS` threads.

    Raises:
        CorruptError: what is stored is not what was saved; the message names the tensor.
    """
    buffers = threading.local()
    with ThreadPoolExecutor(THREADS, thread_name_prefix="meshwright-load") as pool:
        jobs: dict[str, list[tuple[Any, ...]]] = {}
        for want in wanted:
            source = store.tensors[want.key]
            for fragment in source.fragments:
                common = intersect(fragment.box, want.box) if want.box else ()
                if common is None:
                    continue
                target = slice_of(want.target, relative_to(common, want.box))
                piece = _Piece(want.key, source.dtype, fragment, store.file(fragment.file), buffers)
                inner = relative_to(common, fragment.box)
                for at, shape, box, part in _chunks(
                    0, box_shape(fragment.box), inner, target, source.dtype.itemsize
                ):
                    jobs.setdefault(fragment.file, []).append((piece.read, at, shape, box, part))
        files = sorted(jobs)
        first = int(turn * len(files))
        waiting = [pool.submit(*job) for name in files[first:] + files[:first] for job in jobs[name]]
        try:
            for future in waiting:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _chunks(
    offset: int, shape: tuple[int, ...], box: Box, target: torch.Tensor, itemsize: int
) -> list[tuple[int, tuple[int, ...], Box, torch.Tensor]]:
    """Cut the reading of `box` of a row-major array of `shape` into steps of about CHUNK bytes: rows, or parts of a row."""
    if not shape or prod(shape) * itemsize <= CHUNK:
        return [(offset, shape, box, target)]
    inner = prod(shape[1:])
    if inner > 1 and target.is_contiguous() and box[1:] == tuple((0, size) for size in shape[1:]):
        # whole rows into whole rows: one run of memory, cut where blocks are
        (start, length), target = box[0], target.view(-1)
        shape, box = (shape[0] * inner,), ((start * inner, length * inner),)
    row = prod(shape[1:]) * itemsize
    start, length = box[0]
    steps = []
    if row > CHUNK and len(shape) > 1:
        for index in range(length):
            steps += _chunks(offset + (start + index) * row, shape[1:], box[1:], target[index], itemsize)
        return steps
    # whole blocks at a time where rows divide blocks, so that none is read twice
    rows = max(CHUNK // row, 1)
    first = start
    while first < start + length:
        last = min((first // rows + 1) * rows, start + length)
        part = target[first - start : last - start]
        steps.append((offset + first * row, (last - first, *shape[1:]), ((0, last - first), *box[1:]), part))
        first = last
    return steps


class _Piece:
    """One fragment, read in steps by any thread."""

    def __init__(
        self, key: str, dtype: torch.dtype, fragment: Fragment, file: ReadFile, buffers: threading.local
    ) -> None:
        self.key, self.dtype, self.fragment, self.file, self.buffers = key, dtype, fragment, file, buffers
        self.nbytes = prod(box_shape(fragment.box)) * dtype.itemsize

    def read(self, at: int, shape: tuple[int, ...], box: Box, target: torch.Tensor) -> None:
        """`box` of the array of `shape` that starts `at` bytes into the fragment."""
        strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
        first = sum(start * stride for (start, _), stride in zip(box, strides, strict=True))
        last = sum(
            (start + length - 1) * stride for (start, length), stride in zip(box, strides, strict=True)
        )
        itemsize = self.dtype.itemsize
        low, high = at + first * itemsize, at + (last + 1) * itemsize
        start = low // BLOCK * BLOCK
        end = min(-(-high // BLOCK) * BLOCK, self.nbytes)
        straight = (
            low == start
            and high == end
            and high - low == target.numel() * itemsize
            and target.is_contiguous()
            and target.dtype == self.dtype
            and not target.is_cuda
        )
        if straight:
            self._fill(bytes_of_tensor(target), start)
            return
        buffer = self._buffer(end - start)
        self._fill(bytes_of_tensor(buffer), start)
        values = buffer[low - start : high - start].view(self.dtype)
        # from the first to the last wanted element: the array around them need not be in the buffer
        view = values.as_strided(box_shape(box), strides) if shape else values[0]
        with torch.no_grad():
            target.copy_(view)

    def _fill(self, view: memoryview, start: int) -> None:
        self.file.read_into(view, self.fragment.offset + start)
        if not self.fragment.sums:
            return
        from_block = start // BLOCK
        count = -(-len(view) // BLOCK)
        expected = self.fragment.sums[from_block * DIGITS : (from_block + count) * DIGITS]
        if block_sums(view) != expected:
            raise CorruptError(
                f"{self.file.where}: the stored values of {self.key} are damaged (checksum differs at byte "
                f"{self.fragment.offset + start} or up to {len(view)} bytes later)"
            )

    def _buffer(self, nbytes: int) -> torch.Tensor:
        held = getattr(self.buffers, "held", None)
        if held is None or held.numel() < nbytes:
            held = self.buffers.held = torch.empty(max(nbytes, CHUNK + 2 * BLOCK), dtype=torch.uint8)
        return held[:nbytes]


def new_tensor(source: Source) -> torch.Tensor:
    """An empty tensor for all of it."""
    return torch.empty(source.shape, dtype=source.dtype)


def read_whole(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """These tensors, whole. Raises CorruptError, also for a key that is not there."""
    missing = [key for key in keys if key not in store.tensors]
    if missing:
        raise CorruptError(f"{store.where} refers to {missing[0]}, which it does not hold")
    found = {key: new_tensor(store.tensors[key]) for key in keys}
    read(store, [Wanted(key, tuple((0, n) for n in t.shape), t) for key, t in found.items()])
    return found
