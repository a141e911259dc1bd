"""The thread that answers for a rank goes on where the store was silent for a while."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.mesh import deadlock
from meshwright_dtensor.mesh.bounded_store import BoundedStore
from meshwright_dtensor.mesh.lost_ranks import LostRanks
from meshwright_dtensor.testing.rank_pool import RankPool


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


class Blocking(torch.utils.data.Dataset[int]):
    """A data set of the user that waits for its disk."""

    def __init__(self, begun: threading.Event, goes_on: threading.Event) -> None:
        self.begun, self.goes_on = begun, goes_on

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> int:
        self.begun.set()
        self.goes_on.wait(30)
        return index


def frame_in(work: Callable[[], Any], begun: threading.Event, goes_on: threading.Event) -> FrameType:
    """The frame of a thread that does some work, after it has begun."""
    thread = threading.Thread(target=work)
    thread.start()
    try:
        assert begun.wait(30)
        time.sleep(0.1)
        return sys._current_frames()[thread.ident or 0]
    finally:
        goes_on.set()
        thread.join()


def test_code_of_the_user_that_ours_calls_waits_for_no_rank() -> None:
    begun, goes_on = threading.Event(), threading.Event()
    rows = Blocking(begun, goes_on)
    # as a loop of ours over data
    ours: dict[str, Any] = {"__name__": "meshwright.loop", "rows": rows}
    exec("def read():\n    return rows[0]\ndef waits():\n    goes_on.wait(30)", ours)
    assert not deadlock._waits_for_ranks(frame_in(ours["read"], begun, goes_on))
    ours |= {"goes_on": (goes_on := threading.Event())}
    begun.set()
    assert deadlock._waits_for_ranks(frame_in(ours["waits"], begun, goes_on))


def test_torch_waits_for_data_and_for_ranks() -> None:
    for folder, waits in (("distributed", True), ("distributed/checkpoint", False), ("utils/data", False)):
        begun, goes_on = threading.Event(), threading.Event()
        file = str(Path(torch.__file__).parent / folder / "x.py")
        torchs: dict[str, Any] = {"__name__": "torch.x", "begun": begun, "goes_on": goes_on}
        exec(compile("def work():\n    begun.set()\n    goes_on.wait(30)", file, "exec"), torchs)
        assert deadlock._waits_for_ranks(frame_in(torchs["work"], begun, goes_on)) is waits, folder


def waits_seen(rank: int, size: int, for_storage: bool) -> list[bool]:
    """Which ranks are seen to wait for others, where rank 0 waits inside of ours for its disk, or for others."""
    over, goes_on = threading.Event(), threading.Event()
    watch = threading.Thread(target=deadlock._watch_store, args=(LostRanks.of_job(), 0.1, over))
    watch.start()
    seen: list[bool] = []

    def look() -> None:
        store = LostRanks.of_job().store
        keys, told = [f"meshwright/waits/{other}" for other in range(size)], f"seen {for_storage}"
        waiting = keys[1:] if for_storage else keys
        while not store.check([told]) and not store.check(waiting):
            time.sleep(0.05)
        # one that is wrong would have come by now
        time.sleep(4 * deadlock.POLL_SECONDS if for_storage else 0)
        if not rank:
            seen.extend(store.check([key]) for key in keys)
            store.set(told, "")
        while not store.check([told]):
            time.sleep(0.05)
        goes_on.set()

    looking = threading.Thread(target=look)
    looking.start()
    ours: dict[str, Any] = {"__name__": "meshwright.loop", "goes_on": goes_on}
    exec("def wait():\n    goes_on.wait(60)", ours)
    with waiting_for_storage() if for_storage and rank == 0 else nullcontext():
        ours["wait"]()
    looking.join()
    over.set()
    watch.join()
    return seen


@pytest.mark.parametrize("for_storage", [True, False])
def test_a_rank_that_waits_for_its_disk_waits_for_no_other(rank_pool: RankPool, for_storage: bool) -> None:
    assert rank_pool.run(2, waits_seen, for_storage)[0] == [not for_storage, True]
