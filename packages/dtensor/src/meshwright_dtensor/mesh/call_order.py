"""Compares the calls of all ranks that need every rank, so that a call of one rank alone is an error and meets no other collective.

A collective has no name: where rank 0 alone reads a norm, its sum meets whatever the other ranks reduce next, and gloo aborts, or
both get a wrong number. Inside of a model and its backward pass all ranks run the same code. What the user calls is compared: the
model, and collectives outside of it. A call is compared where it follows another call for the first time, through the store of
the process group; after that its order is known, and it costs a lookup.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright_dtensor._torch.groups import default_store
from meshwright_dtensor._torch.modes import in_backward
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.error_report import RANK_ENDED, RANK_LATE
from meshwright_dtensor.mesh.mesh import timeout_of_world
from meshwright_dtensor.mesh.users_line import users_line

_KEY = "meshwright/calls/"
_POLLS = (0.0005, 1.0)
"""Seconds before the first and second question to the store, doubled each time, and at most."""
_PROC = Path("/proc")


class CallOrder:
    """The calls of this rank on one mesh that need every rank. It compares none before `compare_as`."""

    def __init__(self) -> None:
        self._inside = 0
        self._store: Any = None
        self._name, self._last = "", ""
        self._followed: set[tuple[str, str]] = set()

    def compare_as(self, name: str) -> None:
        """Compare calls from now on. `name`: the same on every rank of the world, and of no other mesh."""
        self._store, self._name = default_store().clone(), f"{_KEY}{name}/"
        self._store.set(f"{self._name}process {dist.get_rank()}", _process())
        # at exit, too
        weakref.finalize(self, _tell_end, self._store, self._name)

    def enter(self, call: str) -> None:
        """Follow a call of the model; calls inside of it are not followed until `leave`. Raises UsageError: as `follow` does."""
        self.follow(call)
        if _in_main_thread():
            self._inside += 1

    def leave(self) -> None:
        """The call of the model has ended, perhaps by an error before it was entered."""
        if _in_main_thread():
            self._inside = max(self._inside - 1, 0)

    def follow(self, call: str) -> None:
        """Note a call; compare it with those of the other ranks if it has not followed the one before it yet.

        Raises UsageError: another rank makes another call, or has ended; on every rank.
        """
        if self._store is None or self._inside or in_backward() or not _in_main_thread():
            return
        step, self._last = (self._last, call), call
        if step not in self._followed:
            self._followed.add(step)
            self._compare(call)

    def _compare(self, call: str) -> None:
        key, mine = (
            f"{self._name}{len(self._followed)}",
            [dist.get_rank(), call, *users_line(sys._getframe())],
        )
        first = json.loads(self._store.compare_set(key, "", json.dumps(mine)))
        if first[1] != call:
            self._store.set(f"{key}/end", json.dumps([first, mine]))
        elif self._store.add(f"{key}/here", 1) == dist.get_world_size():
            self._store.set(f"{key}/end", "[]")
        with waiting():
            self._wait(f"{key}/end", _told(mine))
        different = json.loads(self._store.get(f"{key}/end"))
        if different:
            raise UsageError(
                f"ranks make different calls that need every rank: {' and '.join(map(_told, different))}. Make each of them on all "
                "ranks, in the same order (not inside of `if rank == 0:`)"
            )

    def _wait(self, key: str, call: str) -> None:
        """Wait until the other ranks have made a call. Raises UsageError: one of them has ended, or makes none in time."""
        pause, longest = _POLLS
        end = time.monotonic() + timeout_of_world()
        while not self._store.check([key]):
            over = time.monotonic() > end
            # a rank that has ended may have answered before
            if (over or (pause >= longest and self._lost())) and not self._store.check([key]):
                why = RANK_LATE if over else RANK_ENDED
                raise UsageError(f"{why}, and {call} needs every rank: make this call on all of them")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _lost(self) -> bool:
        """Whether a rank has ended: it has said so, or it was a process of this host and is none any more."""
        if self._store.check([f"{self._name}ended"]):
            return True
        keys = [f"{self._name}process {rank}" for rank in range(dist.get_world_size())]
        here = _process().rpartition(" ")[0]
        places = [place.decode().rpartition(" ") for place in self._store.multi_get(keys)]
        return any(home and home == here and not _runs(pid) for home, _, pid in places)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _process() -> str:
    """Where the number of this process holds, and the number; a blank where that cannot be said."""
    with suppress(OSError):
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink(_PROC / 'self/ns/pid')} {os.getpid()}"
    return " "


def _runs(pid: str) -> bool:
    """Whether the process is there, and not a zombie."""
    with suppress(OSError):
        return (_PROC / pid / "stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _tell_end(store: Any, name: str) -> None:
    # the store may be gone
    with suppress(Exception):
        store.set(f"{name}ended", "1")


def _told(call: list[Any]) -> str:
    rank, what, where, line = call
    return f"rank {rank} {where}: {line} ({what})"
