"""Memory of the host that is there before it is needed: the system finds it page by page, on the first touch, which takes four
times as long as to copy into what is there."""

from __future__ import annotations

import mmap
import threading

import torch

from meshwright_checkpoint.streaming import aligned_memory
from meshwright_checkpoint.worker import yield_to_training

PART = 16 << 20
"""Bytes that are touched at a time."""
SLACK = 64 << 20
"""Bytes more than asked for, where what is not touched costs nothing: what else is saved (`extra`) may grow."""


def new_memory(nbytes: int, pinned_for: int | None) -> torch.Tensor:
    """Bytes; pinned for the GPU of that number, else page-aligned (it is written to files from where it is)."""
    if pinned_for is None:
        return aligned_memory(nbytes + SLACK)
    with torch.cuda.device(pinned_for):
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


class Reserved:
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
