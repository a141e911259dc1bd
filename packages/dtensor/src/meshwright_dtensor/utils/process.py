"""This process: its CPU cores, its garbage collection, its freed memory, and a clean exit if it used gloo.

A gloo thread takes the GIL to release the tensors of a finished collective. A thread that asks for the GIL during
interpreter shutdown aborts the process: "terminate called without an active exception". ``destroy_process_group`` ends the
threads of a group only if nothing else refers to the group. Meshes refer to it, and torch's own caches refer to meshes.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

THREADS = Path("/proc/self/task")
# a thread that waits for the GIL wakes up more often than that
POLL_SECONDS = 0.01
FIELDS = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside, garbage collection is off: imports and searches create many long-lived objects, and
    scanning them took a quarter of the time.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            if not gc.get_freeze_count():
                # into the oldest generation: the next collection would scan all that is new
                gc.freeze()
                gc.unfreeze()
            gc.enable()


def return_freed_memory() -> None:
    """Give what was freed back to the system; glibc keeps it for this process, where other C libraries have no such call."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


@cache
def settle_at_exit() -> None:
    """Register `settle` to run at exit, once."""
    atexit.register(settle)


def settle(timeout: float = 1.0) -> None:
    """Wait until every gloo thread of this process sleeps, so that none of them holds a tensor of a finished collective.

    A thread in a collective that its peers never join sleeps too, so this does not wait for it. It takes two polls, or no
    time without gloo threads.
    """
    # not Linux
    if not THREADS.is_dir():
        time.sleep(5 * POLL_SECONDS)
        return
    end = time.monotonic() + timeout
    before = _gloo_threads()
    while before and time.monotonic() < end:
        # releases the GIL
        time.sleep(POLL_SECONDS)
        now = _gloo_threads()
        if now == before and all(state.startswith("S") for state, *_ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """State and context switches of each gloo thread, by thread id."""
    threads = {}
    for thread in THREADS.iterdir():
        # the thread may end in between
        with suppress(OSError):
            lines = (thread / "status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if status["Name"].startswith("pt_gloo"):
                threads[thread.name] = tuple(status[field] for field in FIELDS)
    return threads


def usable_cores() -> int:
    """The number of cores that this process may run on; on macOS and Windows, of all cores."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
