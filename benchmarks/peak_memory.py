"""Resident memory of a process at its highest during one step."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

PAGE = 4096
WARM_UP = 2
"""Steps before: the first ones make gradients and optimizer states, and record and derive."""


def resident_peak() -> int:
    """Highest resident memory since the mark was cleared, in bytes."""
    text = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmHWM"))) * 1024


def peak_of_step(setup: Callable[[], Callable[[], object]]) -> int:
    """Bytes that a steady step takes at most, above what the process had before `setup`, which returns the step."""
    # what was freed before, but is kept for later: the step would be given it, and seem to take less
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)
    before = int(Path("/proc/self/statm").read_text().split()[1]) * PAGE
    step = setup()
    for _ in range(WARM_UP):
        step()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    step()
    return resident_peak() - before
