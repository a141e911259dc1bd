"""Keeps pages of mapped files out of a process: what was written stays in the file, and in the kernel's cache while there is room.

The kernel maps each page that is touched and never unmaps it by itself, so that a process which fills files of any size would
look as large as they are (RssFile of proc(5)).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from meshwright_dtensor._torch.core import weak_storage

CEILING = 256 << 20
"""Bytes of mapped files that a process holds at most, beyond those that it had, but for what it fills between two looks."""

INTERVAL = 0.01
"""Seconds between two looks: so much is written meanwhile that the ceiling may be passed by."""

_DONTNEED = 4  # of a shared mapping: pages are unmapped, and lose nothing


def release(storage: torch.UntypedStorage) -> None:
    """Unmap the pages of a storage that is a mapped file; they come back when they are touched."""
    _advise(storage.data_ptr(), storage.nbytes())


def _advise(address: int, nbytes: int) -> None:
    if not sys.platform.startswith("linux") or not nbytes:
        return
    ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), _DONTNEED)


class Resident:
    """Watches how much of its storages is mapped, and unmaps it where that is too much."""

    def __init__(self, ceiling: int = CEILING) -> None:
        self._ceiling = ceiling
        self._storages: list[Callable[[], torch.UntypedStorage | None]] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._base = mapped_bytes()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Watch this one too; it lives no longer for it."""
        with self._lock:
            self._storages.append(weak_storage(storage))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, about the ceiling is mapped at most (see INTERVAL), and afterwards nothing."""
        # one call may fill more than memory has, so that another thread has to look while it runs
        thread = threading.Thread(target=self._watch, daemon=True, name="meshwright-resident")
        thread.start()
        try:
            yield
        finally:
            self._done.set()
            thread.join()
            self.sweep()

    def sweep(self) -> None:
        """Unmap everything."""
        with self._lock:
            living = []
            for find in self._storages:
                storage = find()
                if storage is not None:
                    release(storage)
                    living.append(find)
            self._storages = living
        self._base = mapped_bytes()

    def _watch(self) -> None:
        while not self._done.wait(INTERVAL):
            if mapped_bytes() - self._base > self._ceiling:
                self.sweep()


def mapped_bytes() -> int:
    """Bytes of files that are mapped into this process and present: RssFile and RssShmem; 0 where the system does not say."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    return 0
