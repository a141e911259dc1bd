"""Write a file in order, at the speed of the disk: large ones around the system's page cache (O_DIRECT), the rest through it.

Through the cache every byte is copied into memory that the system has to find first, and the disk idles until it is told to
begin; around it the disk reads what is written where it lies, one chunk while the next is being made, and training keeps the
processor, the cache and the memory to itself.  File systems that cannot do so are written to through the cache.
"""

from __future__ import annotations

import fcntl
import os
from collections import deque
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from meshwright_checkpoint.io.direct_read import ALIGN, REFUSED
from meshwright_checkpoint.io.host_memory import aligned_memory
from meshwright_checkpoint.io.worker import Worker

CHUNK = 8 << 20
"""Bytes that are written at a time; a smaller file goes through the cache."""
LARGE = 1 << 20
"""Bytes from which it is worth to write what lies aligned where it lies."""
WAITING = 2
"""Chunks that are on their way at a time."""

Bytes: TypeAlias = NDArray[np.uint8]


class Writer:
    """A file that is written in order and is durable once closed. What it is given stays unchanged until then."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        self._at = 0  # bytes that have been sent
        self._direct = False
        self._worker: Worker[None] | None = None
        self._sent: deque[Future[None]] = deque()
        self._buffer, self._filled = _buffer(), 0
        self._other: tuple[Bytes, Future[None]] | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append. Raises OSError, also for what was written before."""
        rest = np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, np.uint8)
        while rest.size:
            count = self._write_in_place(rest)
            if not count:
                count = min(rest.size, CHUNK - self._filled)
                self._copy(rest[:count])
            rest = rest[count:]

    def close(self, durable: bool = True) -> None:
        """Close; `durable`: once the system has it on the disk."""
        try:
            if durable:
                self._finish()
                os.fsync(self._fd)
        finally:
            for future in self._sent:
                future.cancel()
            if self._worker is not None:
                self._worker.close()
            os.close(self._fd)

    def _write_in_place(self, rest: Bytes) -> int:
        """Send what is aligned in memory as it will be in the file; the number of bytes, or 0 where it has to be copied."""
        position = self._at + self._filled
        lead = -position % ALIGN
        if rest.size - lead < LARGE or (rest.ctypes.data - position) % ALIGN:
            return 0
        if lead:
            self._copy(rest[:lead])
        if self._filled:
            self._flush()
        count = min(rest.size - lead, CHUNK) // ALIGN * ALIGN
        self._send(rest[lead : lead + count])
        return lead + count

    def _copy(self, some: Bytes) -> None:
        np.copyto(self._buffer[self._filled : self._filled + some.size], some)
        self._filled += some.size
        if self._filled == CHUNK:
            self._flush()

    def _flush(self) -> None:
        """Send what is in the buffer, and take the other one."""
        full, future = self._buffer, self._send(self._buffer[: self._filled])
        if self._other is None:
            self._buffer = _buffer()
        else:
            self._buffer, before = self._other
            before.result()
        self._other, self._filled = (full, future), 0

    def _send(self, data: Bytes) -> Future[None]:
        if self._worker is None:
            self._worker = Worker("meshwright-write")
            self._direct = _set_direct(self._fd)
        while len(self._sent) >= WAITING:
            self._sent.popleft().result()
        at = self._at
        self._at += data.size
        self._sent.append(self._worker.submit(lambda: self._put(data, at)))
        return self._sent[-1]

    def _put(self, data: Bytes, at: int) -> None:
        view, done = data.data, 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], at + done)
            except OSError as error:
                if error.errno not in REFUSED or not self._direct:
                    raise
                self._direct = _set_direct(self._fd, False)
        if not self._direct:
            _start_writing(self._fd, at, len(view))

    def _finish(self) -> None:
        while self._sent:
            self._sent.popleft().result()
        size = self._at + self._filled
        last = self._buffer[: self._filled]
        if self._direct and self._filled % ALIGN:
            last = self._buffer[: self._filled + -self._filled % ALIGN]
            last[self._filled :] = 0
        self._put(last, self._at)
        if last.size > self._filled:
            os.ftruncate(self._fd, size)


def _buffer() -> Bytes:
    return aligned_memory(CHUNK).numpy()


def _set_direct(fd: int, on: bool = True) -> bool:
    """Let writes go around the page cache, or through it again; whether they go around it."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:  # this file system cannot
        return False
    return on


def _start_writing(fd: int, start: int, nbytes: int) -> None:
    """Let the system begin to write these bytes to the disk now, not when it has to; it does not wait for them.

    "Not needed any more" says so: what has been written leaves the cache, what has not is sent to the disk (and stays). Without it
    Linux keeps up to a tenth of all memory back until fsync, and then the disk works alone.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a file system that has no such advice
            os.posix_fadvise(fd, start, nbytes, os.POSIX_FADV_DONTNEED)
