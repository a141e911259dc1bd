"""Timing: the minimum of several repeats, since other processes only ever make them longer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def sync() -> None:
    """Wait for the accelerator, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device() -> torch.device:
    """The device of ranks on this machine."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def least(action: Callable[[], object], budget: float, repeats: int = 50) -> float:
    """The minimum time of `action` in seconds: after a warm-up, of at least three runs, until `budget` seconds are spent.

    On a CPU with one thread, only time of this thread counts.
    """
    alone = device().type == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter
    action()
    sync()
    begin, best = time.perf_counter(), float("inf")
    for number in range(repeats):
        start = clock()
        action()
        sync()
        best = min(best, clock() - start)
        if number >= 2 and time.perf_counter() - begin > budget:
            break
    return best
