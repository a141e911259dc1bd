"""Ends a job whose ranks wait for each other in different calls, and says in which.

A call that needs every rank, made by one rank alone (in `if rank == 0:`), waits for the others; these wait in their next call for
that rank. gloo says so after half an hour, or aborts. Here a thread of each rank sees that the rank waits: for some seconds its
main thread has used no CPU and is in a function of torch.distributed or of this framework, and the process has sent nothing. It
then tells the other ranks, through the store of the process group, in which line of the user's code. Once all ranks wait, and
not all in the same line, none of them can go on. A rank that waits for storage or for data (`storage_waits`) waits for no
other one. The same thread answers the questions of `lost_ranks`, and says once which ranks do not answer where this one waits for
them.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.devices.storage_waits import StorageWaits
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.bounded_store import SilentStoreError
from meshwright_dtensor.mesh.error_report import record_error
from meshwright_dtensor.mesh.lost_ranks import ANSWER_SECONDS, LISTEN_SECONDS, LostRanks, in_words
from meshwright_dtensor.mesh.users_line import is_ours, is_pythons, is_users, outwards, users_line

WAITING_SECONDS = 10.0
"""A rank that has done nothing for so long waits."""

POLL_SECONDS = 0.5
RETRY_SECONDS = 5.0
"""Before the first new connection to a store that was silent."""
IDLE_SECONDS, IDLE_BYTES = 5e-3, 1 << 14
"""CPU time of the main thread, and bytes that the process writes, between two polls of a rank that waits."""

_IO = Path("/proc/self/io")
_TORCH = Path(torch.__file__).parent
_DISTRIBUTED = str(_TORCH / "distributed") + os.sep
_STORAGE = tuple(str(_TORCH / folder) + os.sep for folder in ("utils/data", "distributed/checkpoint"))
"""Code of torch that waits for storage, except where it calls a collective."""
_INNERMOST = 4
"""Frames among which a function of torch.distributed or of this framework is looked for."""
_KEY, _COUNT, _NAME = "meshwright/waits/", "meshwright/waiting", "meshwright deadlocks"


def watch_for_deadlocks(seconds: float = WAITING_SECONDS) -> None:
    """Start the thread where there are several ranks, unless it runs. `seconds`: without activity, after which a rank waits."""
    running = any(thread.name == _NAME for thread in threading.enumerate())
    # of Linux
    if dist.get_world_size() > 1 and not running and _IO.exists():
        over = threading.Event()
        arguments = (LostRanks.connector(), seconds, over)
        thread = threading.Thread(target=_watch, args=arguments, name=_NAME, daemon=True)
        thread.start()
        atexit.register(_stop, thread, over)


def _stop(thread: threading.Thread, over: threading.Event) -> None:
    """End the thread: one that comes back from the store, which is C++, while the interpreter ends would abort the process."""
    over.set()
    thread.join(2 * ANSWER_SECONDS)


def _watch(
    connect: Callable[[], LostRanks], seconds: float, over: threading.Event, pause: float = RETRY_SECONDS
) -> None:
    """Watch, over one connection after the other: one whose store has been silent for a while is not asked again.

    Without it, this rank would answer nobody from then on, and be taken for one that is stopped.
    """
    # where the store has ended, so has the job
    with suppress(RuntimeError):
        while not over.is_set():
            try:
                _watch_store(connect(), seconds, over)
            except SilentStoreError:
                # each connection to a host that is lost has a thread that waits: so fewer and fewer
                over.wait(pause)
                pause *= 2


def _watch_store(lost: LostRanks, seconds: float, over: threading.Event) -> None:
    store, main = lost.store, threading.main_thread().ident or 0
    # an earlier connection may have left it
    store.delete_key(_KEY + str(lost.rank))
    lost.announce()
    clock = time.pthread_getcpuclockid(main)
    used, sent, since, polls, has_looked = 0.0, 0, time.monotonic(), 0, False
    heard, for_storage = 0.0, False
    while not over.wait(POLL_SECONDS):
        if time.monotonic() - heard > LISTEN_SECONDS:
            heard = time.monotonic()
            lost.answer()
        before, used, sent = (used, sent), time.clock_gettime(clock), _bytes_written()
        works = used - before[0] > IDLE_SECONDS or sent - before[1] > IDLE_BYTES
        frame = sys._current_frames().get(main)
        # others may wait for it meanwhile, but it waits for none of them
        was_for_storage, for_storage = for_storage, StorageWaits.depth > 0
        idle = not works and frame is not None and (for_storage or _waits_for_ranks(frame))
        if polls and (for_storage or not idle):
            store.delete_key(_KEY + str(lost.rank))
            store.add(_COUNT, -1)
            polls = 0
        if not idle or for_storage != was_for_storage:
            since, has_looked = time.monotonic(), False
        if frame is None or time.monotonic() - since < seconds:
            continue
        all_wait = False
        if not for_storage:
            polls += 1
            if polls == 1:
                store.add(_COUNT, 1)
            store.set(_KEY + str(lost.rank), json.dumps([polls, *users_line(frame)]))
            all_wait = _compare_waits(lost)
        if not has_looked and not all_wait:
            # also while it waits for storage: ranks of one host read for each other
            has_looked = True
            _say_who_is_silent(lost, users_line(frame))


def _compare_waits(lost: LostRanks) -> bool:
    """Whether all ranks wait. Ends the process where they have waited for some time, not all in the same line."""
    waits = _all_waits(lost.store, lost.ranks)
    if waits and min(count for count, *_ in waits) > 2 and len({tuple(place) for _, *place in waits}) > 1:
        _end(lost.rank, [(where, line) for _, where, line in waits])
    return bool(waits)


def _say_who_is_silent(lost: LostRanks, place: tuple[str, str]) -> None:
    """Print which ranks do not answer, on the first of those that do."""
    silent = lost.silent()
    if silent and lost.rank == min(set(range(lost.ranks)) - silent.keys()):
        for rank, process in silent.items():
            text = f"{in_words(rank, process)}; this rank waits in {place[0]}: {place[1]}"
            print(f"[rank{lost.rank}]: {text}", file=sys.stderr, flush=True)


def _bytes_written() -> int:
    """Bytes that this process has written to files and sockets."""
    fields = dict(line.split(": ") for line in _IO.read_text().splitlines())
    return int(fields["wchar"])


def _waits_for_ranks(frame: FrameType) -> bool:
    """Whether a thread at this frame may wait for another rank: in a function of torch.distributed or of this framework.

    Not where such a function has called code of the user, or a loader of data, which may wait for anything.
    """
    for f, _ in zip(outwards(frame), range(_INNERMOST), strict=False):
        file = f.f_code.co_filename
        if file.startswith(_STORAGE):
            return False
        if is_ours(f) or file.startswith(_DISTRIBUTED):
            return True
        if is_users(f) and not is_pythons(f):
            return False
    return False


def _all_waits(store: Any, world: int) -> list[tuple[int, str, str]]:
    """(polls, place, line) of every rank; empty unless all wait."""
    keys = [_KEY + str(rank) for rank in range(world)]
    # the number first, which is quick with many ranks
    if store.add(_COUNT, 0) < world or not store.check(keys):
        return []
    return [tuple(json.loads(text)) for text in store.multi_get(keys)]


def _end(rank: int, waits: list[tuple[str, str]]) -> None:
    """Report, and end this process: a thread that waits in a collective cannot be woken."""
    by_place: dict[tuple[str, str], list[int]] = {}
    for other, place in enumerate(waits):
        by_place.setdefault(place, []).append(other)
    lines = [
        f"  rank {', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}: {where}: {line}"
        for (where, line), ranks in by_place.items()
    ]
    text = "\n".join(
        [
            "the ranks wait for each other in different calls, and none of them can go on:",
            *lines,
            "Each of these calls needs every rank: make it on all of them (not inside of `if rank == 0:`)",
        ]
    )
    if not rank:
        print(f"[rank0]: {text}", file=sys.stderr, flush=True)
    record_error(UsageError(text))
    # the end of another rank is no second cause
    sys.excepthook = lambda *_: os._exit(1)
    sys.stdout.flush()
    # the others read this rank's wait once more
    time.sleep(4 * POLL_SECONDS)
    os._exit(1)
