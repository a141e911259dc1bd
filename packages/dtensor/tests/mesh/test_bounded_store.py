"""Requests to a store that does not answer end."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch.distributed as dist

from meshwright_dtensor.mesh.bounded_store import BoundedStore, SilentStoreError
from meshwright_dtensor.mesh.error_report import _lost_ranks
from meshwright_dtensor.mesh.lost_ranks import LostRanks


class Silent:
    """A store at the end of a link that was cut; `asked` counts the requests."""

    def __init__(self) -> None:
        self.over, self.asked = threading.Event(), 0

    def check(self, keys: list[str]) -> bool:
        self.asked += 1
        self.over.wait(30)
        return False

    def set(self, key: str, value: str) -> None:
        """Goes into the socket."""


def test_a_silent_store_is_asked_once() -> None:
    silent = Silent()
    store = BoundedStore(lambda: silent, seconds=0.05)
    for request in (lambda: store.set("key", "value"), lambda: store.get("key")):
        with pytest.raises(SilentStoreError, match="on the host of rank 0, does not answer"):
            request()
    assert silent.asked == 1
    silent.over.set()


def test_a_rank_that_fails_says_that_the_store_is_silent() -> None:
    silent = Silent()
    lost = LostRanks(BoundedStore(lambda: silent, seconds=0.05), 1, 2)
    ((told,), none) = _lost_ranks(lost, None)
    assert "that host or its link is lost" in told and none == []
    lost.say_ended("its script has come to its end")
    silent.over.set()


def test_a_store_that_answers() -> None:
    inner: Any = dist.HashStore()  # type: ignore[attr-defined]
    store = BoundedStore(lambda: inner)
    store.set("a", "1")
    assert store.check(["a"]) and not store.check(["a", "b"]) and store.get("a") == b"1"
    assert store.add("sum", 2) == 2 and store.multi_get(["a", "sum"]) == [b"1", b"2"]
    store.delete_key("a")
    assert not store.check(["a"])

    def ended() -> Any:
        raise RuntimeError("connection refused")

    with pytest.raises(RuntimeError, match="refused"):
        BoundedStore(ended).check(["a"])
