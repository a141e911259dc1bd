"""Compares the calls of all ranks that need every rank, so that a call of one rank alone is an error and meets no other collective.

A collective has no name: where rank 0 alone reads a norm, its sum meets whatever the other ranks reduce next, and gloo aborts, or
both get a wrong number. Inside of a model and its backward pass all ranks run the same code. What the user calls is compared: the
model, and collectives outside of it. A call is compared where it follows another call for the first time, through the store of
the process group; after that its order is known, and it costs a lookup.
"""

from __future__ import annotations

import atexit
import json
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from typing import Any

import torch.distributed as dist

from meshwright_dtensor._torch.core import default_store, in_backward
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.deadlock import users_line

_KEY = "meshwright/calls/"
_ENDED = "meshwright/ended"
_POLLS = (0.0005, 1.0)
"""Seconds before the first and second question to the store, doubled each time, and at most."""


class CallOrder:
    """The calls of this rank on one mesh that need every rank. It compares none before `compare_as`."""

    def __init__(self) -> None:
        self.inside = 0
        self._store: Any = None
        self._name, self._last = "", ""
        self._followed: set[tuple[str, str]] = set()

    def compare_as(self, name: str) -> None:
        """Compare calls from now on. `name`: the same on every rank of the world, and of no other mesh."""
        self._store, self._name = default_store().clone(), f"{_KEY}{name}/"

    def follow(self, call: str) -> None:
        """Note a call; compare it with those of the other ranks if it has not followed the one before it yet.

        Raises UsageError: another rank makes another call, or has ended; on every rank.
        """
        if self._store is None or self.inside or in_backward():
            return
        if threading.current_thread() is not threading.main_thread():
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
        pause, last = _POLLS
        while not self._store.check([f"{key}/end"]):
            ended = self._store.check([_ENDED])
            # a rank that has ended may have answered before
            if ended and not self._store.check([f"{key}/end"]):
                raise UsageError(
                    f"another rank has ended, and {_told(mine)} needs every rank: make this call on all of them"
                )
            time.sleep(pause)
            pause = min(2 * pause, last)
        different = json.loads(self._store.get(f"{key}/end"))
        if different:
            raise UsageError(
                f"ranks make different calls that need every rank: {' and '.join(map(_told, different))}. Make each of them on all "
                "ranks, in the same order (not inside of `if rank == 0:`)"
            )


def _told(call: list[Any]) -> str:
    rank, what, where, line = call
    return f"rank {rank} {where}: {line} ({what})"


@cache
def tell_of_end() -> None:
    """Let ranks that wait for this one know when it ends."""
    store = default_store().clone()

    def tell() -> None:
        # the store may be gone
        with suppress(Exception):
            store.set(_ENDED, str(dist.get_rank()))

    atexit.register(tell)
