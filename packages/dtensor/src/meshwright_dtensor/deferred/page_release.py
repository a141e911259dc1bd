"""Unmaps the pages of mapped files: the data stays in the file, and in the kernel's page cache while there is room.

The kernel maps each page that is touched and does not unmap it by itself, so the resident size of a process that fills
files grows with them (RssFile of proc(5)).
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from meshwright_dtensor._torch.core import weak_storage
from meshwright_dtensor.deferred.mapped_files import is_shared
from meshwright_dtensor.deferred.private_pages import has_private_writes, libc

CEILING = 256 << 20
"""Bytes of mapped files that a process keeps, beyond those at the start; it may exceed them for one interval."""

INTERVAL = 0.01
"""Seconds between two checks; the ceiling may be exceeded by the bytes written meanwhile."""

# on a shared mapping: pages are unmapped, and no data is lost
_DONTNEED = 4


def release(storage: torch.UntypedStorage) -> None:
    """Unmap the pages of a storage that is a mapped file; they come back when they are touched.

    In a file that ranks share, a page that this process has written is its own and not in the file: then all pages stay.
    """
    if not (is_shared(storage) and has_private_writes(storage)):
        unmap(storage)


def unmap(storage: torch.UntypedStorage) -> None:
    """Unmap the pages of a storage. Of a private mapping this drops what the process has written: the file's values are back."""
    if sys.platform.startswith("linux") and storage.nbytes():
        libc().madvise(storage.data_ptr(), storage.nbytes(), _DONTNEED)


class Resident:
    """Keeps the mapped bytes of its storages below a ceiling."""

    def __init__(self, ceiling: int = CEILING) -> None:
        self._ceiling = ceiling
        self._storages: list[Callable[[], torch.UntypedStorage | None]] = []
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._base = mapped_bytes()

    def add(self, storage: torch.UntypedStorage) -> None:
        """Add a storage; it is not kept alive."""
        with self._lock:
            self._storages.append(weak_storage(storage))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, about the ceiling is mapped at most (see INTERVAL), and afterwards nothing."""

        def watch() -> None:
            while not self._done.wait(INTERVAL):
                if mapped_bytes() - self._base > self._ceiling:
                    self.sweep()

        # a thread, because a single call may fill more than fits into memory
        thread = threading.Thread(target=watch, daemon=True, name="meshwright-resident")
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
                    unmap(storage)
                    living.append(find)
            self._storages = living
        self._base = mapped_bytes()


def mapped_bytes() -> int:
    """Resident bytes of mapped files of this process (RssFile and RssShmem); 0 if the system does not say."""
    with suppress(OSError, IndexError, ValueError):
        return int(Path("/proc/self/statm").read_text().split()[2]) * os.sysconf("SC_PAGE_SIZE")
    return 0
