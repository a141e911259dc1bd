"""How much memory of this machine a rank takes while it does something (Linux)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch.distributed as dist


def freed_goes_back() -> None:
    """Let the C library give large memory back when it is freed, in this process: what it keeps would count as held."""
    mmap_threshold, trim_threshold = -3, -1  # of malloc.h; once set they stay as they are
    libc = ctypes.CDLL(None)
    assert libc.mallopt(mmap_threshold, 256 << 10) == 1
    assert libc.mallopt(trim_threshold, 256 << 10) == 1
    libc.malloc_trim(0)


def resident(kind: str) -> int:
    """Bytes: VmRSS is what is there now, VmHWM the most that was."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith(f"{kind}:"))


def extra(work: Callable[[], object]) -> int:
    """Most memory during `work`, beside what there was before; all ranks do it at once, after `freed_goes_back`."""
    dist.barrier()
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # forget the peak
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before
