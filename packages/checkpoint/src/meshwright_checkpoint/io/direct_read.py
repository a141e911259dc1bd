"""Direct reads: bypass the page cache (O_DIRECT) if that is faster.

Through the cache, each byte is copied once more, into pages that the system must allocate first. On a busy machine this
takes longer than the disk. Data that are already in the cache are read from there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from functools import cache
from typing import Any, Protocol, runtime_checkable

import numpy as np

ALIGN = 4096
"""Alignment of addresses, offsets and lengths. No disk has larger blocks."""
LARGE = 1 << 20
"""Smallest number of bytes for a direct read."""
SAMPLES = 16
"""Pages of a range that are looked up in the cache."""
REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)
"""Errors of direct reads and writes that the system does not support (driver-pinned memory, larger blocks)."""


def pages_nbytes(offset: int, nbytes: int) -> int:
    """Size of the pages that contain `nbytes` from `offset` on."""
    return -(-(offset + nbytes) // ALIGN) * ALIGN - offset // ALIGN * ALIGN


class DirectReader:
    """Direct reads of a file that is open as `fd`. The caller keeps and closes `fd`."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._refused = not hasattr(os, "O_DIRECT")

    def worthwhile(self, offset: int, nbytes: int) -> bool:
        """Whether to read these bytes directly: they are many, and not in the cache."""
        return not self._refused and nbytes >= LARGE and not is_cached(self._fd, offset, nbytes)

    def read(self, memory: memoryview, offset: int, nbytes: int) -> int:
        """Read the pages that contain `nbytes` from `offset` on into page-aligned `memory`.

        Returns:
            Number of bytes read. It is less than needed at the end of the file, or if the file system has no direct
            reads. Read the rest through the cache.

        Raises OSError: the disk failed.
        """
        start, room = offset // ALIGN * ALIGN, pages_nbytes(offset, nbytes)
        done = 0
        if self._refused:
            return 0
        # Opened per read: with two descriptors per file, a large checkpoint could exceed the limit.
        # This name is the same file, even if its path now belongs to another.
        try:
            fd = os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError:
            self._refused = True
            return 0
        try:
            while done < room and done % ALIGN == 0:
                count = os.preadv(fd, [memory[done:room]], start + done)
                if not count:
                    break
                done += count
        except OSError as error:
            if error.errno not in REFUSED:
                raise
            self._refused = True
        finally:
            os.close(fd)
        return done


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes are in the page cache, by up to SAMPLES pages. True if the system cannot tell."""
    page = mmap.PAGESIZE
    start = offset // page * page
    length = offset + nbytes - start
    pages = -(-length // page)
    resident = np.zeros(1, dtype=np.uint8)
    cached_pages = 0
    try:
        with mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            sampled = sorted({pages * (2 * number + 1) // (2 * SAMPLES) for number in range(SAMPLES)})
            # samples only: to look up every page takes a tenth of the load's time
            for page_index in sampled:
                if _mincore()(address + page_index * page, 1, resident.ctypes.data):
                    return True
                cached_pages += int(resident[0]) & 1
    except (OSError, ValueError, AttributeError):
        # the file is shorter, or there is no mincore
        return True
    return cached_pages * 2 > len(sampled)


@cache
def _mincore() -> Any:
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes, mincore.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    return mincore


@runtime_checkable
class DirectFile(Protocol):
    """A file with direct reads, in whole pages."""

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether a direct read is faster for these bytes."""

    def read_pages(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """Read the pages that contain these bytes into page-aligned `memory`. Raises as `read_into`."""
