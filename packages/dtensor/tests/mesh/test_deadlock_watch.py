"""The thread that answers for a rank goes on where the store was silent for a while."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch.distributed as dist

from meshwright_dtensor.mesh import deadlock
from meshwright_dtensor.mesh.bounded_store import BoundedStore
from meshwright_dtensor.mesh.lost_ranks import LostRanks


class Pausing:
    """A connection to a store that does not answer until `goes_on`."""

    def __init__(self, store: Any, goes_on: threading.Event) -> None:
        self.store, self.goes_on = store, goes_on

    def __getattr__(self, name: str) -> Any:
        self.goes_on.wait(30)
        return getattr(self.store, name)


def test_a_rank_answers_again_after_the_store_was_silent() -> None:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    goes_on, over = threading.Event(), threading.Event()
    goes_on.set()
    made: list[LostRanks] = []

    def connect() -> LostRanks:
        made.append(LostRanks(BoundedStore(lambda: Pausing(store, goes_on), seconds=0.2), 1, 2))
        return made[-1]

    watch = threading.Thread(target=deadlock._watch, args=(connect, 100.0, over, 0.05))
    watch.start()
    zero = LostRanks(store, 0, 2)
    zero.announce()
    try:
        while not store.check(["meshwright/process/1"]):
            time.sleep(0.01)
        assert zero.silent(5.0) == {}
        # as a rank that waits has left it
        store.set("meshwright/waits/1", '[3, "train.py:1", "loss.backward()"]')
        goes_on.clear()
        assert zero.silent(2.5).keys() == {1}
        goes_on.set()
        assert zero.silent(10.0) == {}
        assert len(made) > 1 and not store.check(["meshwright/waits/1"])
    finally:
        goes_on.set()
        over.set()
        watch.join()


def test_the_watch_ends_with_the_store() -> None:
    def ended() -> Any:
        raise RuntimeError("connection refused")

    deadlock._watch(lambda: LostRanks(BoundedStore(ended), 0, 2), 100.0, threading.Event())
