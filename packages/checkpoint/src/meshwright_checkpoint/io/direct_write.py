"""Sequential writes at disk speed. Large files bypass the page cache (O_DIRECT), small files go through it.

Through the cache, each byte is copied into pages that the system must allocate first, and the disk starts late. A direct
write goes from the caller's memory to the disk, one chunk while the next is prepared, and takes no CPU, cache or memory
from training. File systems without direct writes are written through the cache.
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
"""Bytes that are written at a time. Smaller files go through the cache."""
LARGE = 1 << 20
"""Smallest number of aligned bytes that are written without a copy."""
MAX_IN_FLIGHT = 2
"""Chunks in flight at a time."""

Bytes: TypeAlias = NDArray[np.uint8]


class Writer:
    """A file that is written sequentially and is durable once closed. Callers must not change the data before that."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        # bytes submitted to the worker
        self._at = 0
        self._direct = False
        self._worker: Worker[None] | None = None
        self._in_flight: deque[Future[None]] = deque()
        self._buffer, self._filled = aligned_memory(CHUNK).numpy(), 0
        self._other: tuple[Bytes, Future[None]] | None = None

    def write(self, data: memoryview | bytes) -> None:
        """Append. Raises OSError, also for earlier writes."""
        rest = np.frombuffer(data, dtype=np.uint8) if len(data) else np.empty(0, np.uint8)
        while rest.size:
            count = self._write_in_place(rest)
            if not count:
                count = min(rest.size, CHUNK - self._filled)
                self._copy(rest[:count])
            rest = rest[count:]

    def close(self, durable: bool = True) -> None:
        """Close. With `durable` wait until the data are on the disk."""
        try:
            if durable:
                while self._in_flight:
                    self._in_flight.popleft().result()
                size = self._filled + (-self._filled % ALIGN if self._direct else 0)
                self._buffer[self._filled : size] = 0
                self._write_at(self._buffer[:size], self._at)
                if size > self._filled:
                    os.ftruncate(self._fd, self._at + self._filled)
                os.fsync(self._fd)
        finally:
            for future in self._in_flight:
                future.cancel()
            if self._worker is not None:
                self._worker.close()
            os.close(self._fd)

    def _write_in_place(self, rest: Bytes) -> int:
        """Submit bytes whose memory alignment equals their file alignment. Returns their number, 0 if a copy is needed."""
        position = self._at + self._filled
        lead = -position % ALIGN
        if rest.size - lead < LARGE or (rest.ctypes.data - position) % ALIGN:
            return 0
        if lead:
            self._copy(rest[:lead])
        if self._filled:
            self._flush()
        count = min(rest.size - lead, CHUNK) // ALIGN * ALIGN
        self._submit(rest[lead : lead + count])
        return lead + count

    def _copy(self, some: Bytes) -> None:
        np.copyto(self._buffer[self._filled : self._filled + some.size], some)
        self._filled += some.size
        if self._filled == CHUNK:
            self._flush()

    def _flush(self) -> None:
        """Submit the buffer, and switch to the other one."""
        full, future = self._buffer, self._submit(self._buffer[: self._filled])
        if self._other is None:
            self._buffer = aligned_memory(CHUNK).numpy()
        else:
            self._buffer, before = self._other
            before.result()
        self._other, self._filled = (full, future), 0

    def _submit(self, data: Bytes) -> Future[None]:
        if self._worker is None:
            self._worker = Worker("meshwright-write")
            self._direct = _set_direct(self._fd)
        while len(self._in_flight) >= MAX_IN_FLIGHT:
            self._in_flight.popleft().result()
        at = self._at
        self._at += data.size
        self._in_flight.append(self._worker.submit(lambda: self._write_at(data, at)))
        return self._in_flight[-1]

    def _write_at(self, data: Bytes, at: int) -> None:
        view, done = data.data, 0
        while done < len(view):
            try:
                done += os.pwrite(self._fd, view[done:], at + done)
            except OSError as error:
                if error.errno not in REFUSED or not self._direct:
                    raise
                self._direct = _set_direct(self._fd, False)
        # Start write-back of the dirty pages now. Without it Linux holds up to a tenth of all memory until fsync.
        if not self._direct and hasattr(os, "posix_fadvise"):
            # not supported by this file system
            with suppress(OSError):
                os.posix_fadvise(self._fd, at, len(view), os.POSIX_FADV_DONTNEED)


def _set_direct(fd: int, on: bool = True) -> bool:
    """Turn direct writes of a file on or off. Returns whether they are on."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError:
        # not supported by this file system
        return False
    return on
