"""A file of a checkpoint in a file system, that several threads read from."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

from meshwright_checkpoint.errors import CorruptError
from meshwright_checkpoint.io.direct_read import ALIGN, DirectReader
from meshwright_checkpoint.storage.failures import reading


class Reader:
    """A file that several threads read from.

    Reads through the page cache go one at a time, because two interleaved readers stop the system's prefetching.
    Direct reads (`read_pages`) run in parallel.
    """

    def __init__(self, path: Path, follow: bool = False) -> None:
        """`follow`: allow a symbolic link (download caches have them), and read through the page cache."""
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
        with reading(str(path)):
            try:
                self._fd = os.open(path, flags)
            except ValueError as error:
                # of a zero byte, or half of a character
                raise CorruptError(f"{ascii(str(path))[:200]} is no name of a file: {error}") from None
        self._turn = threading.Lock()
        self.where = str(path)
        status = os.fstat(self._fd)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            os.close(self._fd)
            raise CorruptError(f"{path} cannot be read: it is not a regular file")
        self._direct = None if follow else DirectReader(self._fd)

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """Whether `read_pages` is faster for these bytes."""
        return self._direct is not None and self._direct.worthwhile(offset, nbytes)

    def read_pages(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """Read the pages that contain `nbytes` from `offset` on into page-aligned `memory`."""
        start = offset // ALIGN * ALIGN
        with reading(self.where):
            done = 0 if self._direct is None else self._direct.read(memory, offset, nbytes)
        if start + done < offset + nbytes:
            self.read_into(memory[done : offset - start + nbytes], start + done)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill `buffer` from `offset` on. Raises CorruptError if the file is too short, CheckpointError if it cannot be read."""
        done = 0
        with self._turn, reading(self.where):
            while done < len(buffer):
                count = os.preadv(self._fd, [buffer[done:]], offset + done)
                if not count:
                    text = f"{self.where} is truncated: it ends at {offset + done} bytes, {len(buffer) - done} more are expected"
                    raise CorruptError(text)
                done += count

    def close(self) -> None:
        """Close."""
        os.close(self._fd)
