"""Memory of the host: in large pages, and there before it is needed.

A disk that is handed 8 MiB in pages of 4 KiB gets thousands of addresses, and many take only so many at a time: here reads into
pages of 2 MiB were three times as fast, writes 1.4 times.  The system finds memory on the first touch, page by page, which takes
several times as long as to copy into what is there.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from contextlib import suppress
from functools import cache
from typing import Any

import torch

from meshwright_checkpoint.io.worker import yield_to_training

HUGE = 2 << 20
"""Bytes of a large page of most systems."""
PART = HUGE
"""Bytes that are touched at a time: so long may a save have to wait."""
_MAP_FIXED, _MADV_COLLAPSE = 0x10, 25  # Linux; not in the module mmap
SLACK = 64 << 20
"""Bytes more than asked for, where what is not touched costs nothing: what else is saved (`extra`) may grow."""


def aligned_memory(nbytes: int) -> torch.Tensor:
    """New memory that starts with a page, a large one where it is as long; what is not touched costs nothing."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    if nbytes < HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.frombuffer(mmap.mmap(-1, max(nbytes, 1), **private), dtype=torch.uint8)[:nbytes]
    mapped = mmap.mmap(-1, nbytes + HUGE, **private)
    with suppress(OSError):  # a system built without
        mapped.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    start = -memory.data_ptr() % HUGE
    return memory[start : start + nbytes]


def shared_memory(fd: int, nbytes: int) -> torch.Tensor:
    """Memory of a file without a name that other processes map too; it starts with a large page where it is as long."""
    if nbytes < HUGE:
        return torch.frombuffer(mmap.mmap(fd, nbytes), dtype=torch.uint8)
    room = torch.frombuffer(
        mmap.mmap(-1, nbytes + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8
    )
    memory = room[-room.data_ptr() % HUGE :][:nbytes]
    # over a part of the room, which is given back with it; mmap of Python's takes no address
    address = _libc().mmap(
        memory.data_ptr(), nbytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED, fd, 0
    )
    if address != memory.data_ptr():
        raise OSError(ctypes.get_errno(), "shared memory cannot be mapped")
    return memory


def collapse_to_large_pages(memory: torch.Tensor) -> bool:
    """Turn memory that nobody has used, and that starts with a large page, into large pages; False where the system does not."""
    whole = memory.numel() // HUGE * HUGE
    if not whole or memory.data_ptr() % HUGE:
        return False
    memory[:whole:HUGE] = 0  # what is not there at all is not collapsed
    return _libc().madvise(memory.data_ptr(), whole, _MADV_COLLAPSE) == 0 and whole == memory.numel()


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def new_memory(nbytes: int, pinned_for: int | None) -> torch.Tensor:
    """Bytes; pinned for the GPU of that number, else page-aligned (it is written to files from where it is)."""
    if pinned_for is None:
        return aligned_memory(nbytes + SLACK)
    with torch.cuda.device(pinned_for):
        return torch.empty(nbytes + min(SLACK, nbytes // 16 + HUGE), dtype=torch.uint8, pin_memory=True)


class ReservedMemory:
    """At least `nbytes` of memory that a thread of low priority touches, until they are taken."""

    def __init__(self, nbytes: int, pinned_for: int | None) -> None:
        self._nbytes, self._pinned_for = nbytes, pinned_for
        self._memory: torch.Tensor | None = None
        self._wanted = False
        self._thread = threading.Thread(target=self._run, name="meshwright-reserve")
        self._thread.start()

    def take(self) -> torch.Tensor | None:
        """The memory, touched or not; None where there was none. Nothing touches it afterwards."""
        self._wanted = True
        self._thread.join()
        return self._memory

    def ready(self) -> None:
        """Return once all is touched."""
        self._thread.join()

    def _run(self) -> None:
        if self._pinned_for is None:  # pinning cannot be cut short, and a save may wait for it
            yield_to_training()
        try:
            self._memory = new_memory(self._nbytes, self._pinned_for)
        except (MemoryError, RuntimeError, OSError):  # the save itself will say so
            return
        if self._pinned_for is not None:
            return
        pages = self._memory.numpy()[: self._nbytes]
        for at in range(0, self._nbytes, PART):
            if self._wanted or not threading.main_thread().is_alive():
                return
            pages[at : at + PART : mmap.PAGESIZE] = 0
