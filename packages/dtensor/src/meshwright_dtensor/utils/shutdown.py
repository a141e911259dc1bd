"""Leaving a process that used gloo.

When a gloo thread lets go of the tensors of a finished collective it takes the GIL, and a thread that asks for the GIL
while the interpreter is being taken down aborts the process: "terminate called without an active exception".
``destroy_process_group`` ends the threads of a group only when nothing else refers to it; meshes do, and torch's own
caches refer to meshes.
"""

from __future__ import annotations

import atexit
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

THREADS = Path("/proc/self/task")
LOOK = 0.01  # seconds between two looks: a thread that waits for the GIL wakes up more often than that
FIELDS = ("State", "voluntary_ctxt_switches", "nonvoluntary_ctxt_switches")


@cache
def settle_at_exit() -> None:
    """Let `settle` run when this process ends; once, however often it is called."""
    atexit.register(settle)


def settle(timeout: float = 1.0) -> None:
    """Wait until every gloo thread of this process sleeps, so that none of them holds a tensor of a finished collective.

    A thread in a collective that its peers never join sleeps too: this does not wait for it. Costs two looks, or nothing
    where there is no such thread.
    """
    if not THREADS.is_dir():  # not Linux
        time.sleep(5 * LOOK)
        return
    end = time.monotonic() + timeout
    before = _gloo_threads()
    while before and time.monotonic() < end:
        time.sleep(LOOK)  # gives the GIL to who waits for it
        now = _gloo_threads()
        if now == before and all(state.startswith("S") for state, *_ in now.values()):
            return
        before = now


def _gloo_threads() -> dict[str, tuple[str, ...]]:
    """State and number of switches of each thread of gloo's, by its id."""
    found = {}
    for thread in THREADS.iterdir():
        with suppress(OSError):  # it may end meanwhile
            lines = (thread / "status").read_text().splitlines()
            status = {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if status["Name"].startswith("pt_gloo"):
                found[thread.name] = tuple(status[field] for field in FIELDS)
    return found
