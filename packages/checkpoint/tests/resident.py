"""Resident memory of a rank during a task (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch.distributed as dist


def freed_goes_back() -> None:
    """Make malloc return freed large blocks to the system in this process, so that they do not count as resident."""
    mmap_threshold, trim_threshold = -3, -1  # of malloc.h; once set they stay as they are
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 256 << 10) == 1
    assert libc.mallopt(trim_threshold, 256 << 10) == 1
    libc.malloc_trim(0)


def resident(kind: str) -> int:
    """Resident bytes: VmRSS is the present value, VmHWM the peak."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{kind}:"))


def extra(work: Callable[[], object]) -> int:
    """Peak of extra memory during `work`. All ranks run it together, after `freed_goes_back`."""
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before
