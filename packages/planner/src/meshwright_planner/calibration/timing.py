"""How calibration takes times: the least of several repeats, since whatever else runs only ever makes them longer."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def sync() -> None:
    """Wait for what the accelerator still has to do; nothing where there is none."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device() -> torch.device:
    """What ranks of this machine compute on."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def least(action: Callable[[], object], budget: float, repeats: int = 50) -> float:
    """Seconds of `action` at its fastest: after a run to warm up, at least three, until `budget` seconds are spent.

    Where the processor computes on one thread, turns that other processes take do not count.
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
