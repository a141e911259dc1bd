"""Read a file around the system's page cache (O_DIRECT), where that is the faster way.

Through the cache every byte is copied once more, into memory that the system has to find first: on a busy machine that costs more
than the disk does.  What is in the cache already is read from there.
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
"""What addresses, offsets and lengths have to be multiples of: no disk has larger blocks."""
LARGE = 1 << 20
"""Bytes from which it is worth it."""
SAMPLES = 16
"""Pages of a stretch that are looked up in the cache."""
REFUSED = (errno.EINVAL, errno.EFAULT, errno.EOPNOTSUPP)
"""What systems say of reads and writes that cannot go around the cache (memory that a driver has pinned, larger blocks)."""


def pages_nbytes(offset: int, nbytes: int) -> int:
    """Bytes of the pages that hold `nbytes` from `offset` on."""
    return -(-(offset + nbytes) // ALIGN) * ALIGN - offset // ALIGN * ALIGN


class DirectReader:
    """The way around the cache to a file that is open as `fd`, which stays the caller's."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._refused = not hasattr(os, "O_DIRECT")

    def worthwhile(self, offset: int, nbytes: int) -> bool:
        """Whether to go around the cache for these bytes: they are many, and not in it."""
        return not self._refused and nbytes >= LARGE and not is_cached(self._fd, offset, nbytes)

    def read(self, memory: memoryview, offset: int, nbytes: int) -> int:
        """Read the pages that hold `nbytes` from `offset` on into `memory`, which starts with a page.

        Returns:
            How many bytes of `memory` are filled; fewer than needed where the rest has to come through the cache (at the end of
            the file, or from a file system that refuses).

        Raises:
            OSError: the disk has failed.
        """
        start, room = offset // ALIGN * ALIGN, pages_nbytes(offset, nbytes)
        done = 0
        # for this read alone: a checkpoint may have more files than two descriptors each allow
        fd = self._opened()
        if fd is None:
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

    def _opened(self) -> int | None:
        """The same file once more, whatever its name means by now; None where its file system cannot."""
        if not self._refused:
            try:
                return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
            except OSError:
                self._refused = True
        return None


def is_cached(fd: int, offset: int, nbytes: int) -> bool:
    """Whether most of these bytes of a file are in the system's cache, by up to SAMPLES pages of them, or it does not tell.

    Nothing is read.
    """
    page = mmap.PAGESIZE
    start = offset // page * page
    length = offset + nbytes - start
    pages = -(-length // page)
    resident = np.zeros(1, dtype=np.uint8)
    cached_pages = 0
    try:
        mapped = mmap.mmap(fd, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start)
        with mapped:
            address = np.frombuffer(mapped, dtype=np.uint8).ctypes.data
            sampled = sorted({pages * (2 * number + 1) // (2 * SAMPLES) for number in range(SAMPLES)})
            for (
                page_index
            ) in sampled:  # asked for all of them the system looks each up: a tenth of what the load takes
                if _mincore()(address + page_index * page, 1, resident.ctypes.data):
                    return True
                cached_pages += int(resident[0]) & 1
    except (OSError, ValueError, AttributeError):  # the file is shorter, or the system has no such call
        return True
    return cached_pages * 2 > len(sampled)


@cache
def _mincore() -> Any:
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes, mincore.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p], ctypes.c_int
    return mincore


@runtime_checkable
class DirectFile(Protocol):
    """A file that can also be read around the system's cache, in whole pages."""

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether that is the faster way to these bytes."""

    def read_pages(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """Read the pages that hold these bytes into `memory`, which starts with a page; CorruptError where it is not possible."""
