"""Ranks that torchrun starts again find each other, and not the ranks before them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch.distributed import TCPStore

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh import start_store as module
from meshwright_dtensor.mesh.start_store import start_store, store_of_start

RANKS = 3


@pytest.fixture
def port() -> Any:
    server = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    yield server.port
    for thread in threading.enumerate():
        if thread.name == "meshwright start":
            thread.join(5)
    del server


def started(port: int, rank: int, after: float, count: int = RANKS) -> Any:
    time.sleep(after)
    store = TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=20))
    return store_of_start(store, rank, count)


@pytest.mark.parametrize("late", range(RANKS))
def test_each_start_has_a_store_of_its_own(port: int, late: int) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        for number in range(3):
            delays = [0.3 if rank == late else 0.0 for rank in range(RANKS)]
            stores = list(pool.map(started, [port] * RANKS, range(RANKS), delays))
            assert not any(store.check(["address"]) for store in stores)
            stores[0].set("address", str(number))
            assert [store.get("address") for store in stores] == [str(number).encode()] * RANKS


def test_a_rank_that_died_while_it_asked_is_in_nobodys_way(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAITING_SECONDS", 0.2)
    with pytest.raises(UsageError, match=r"waited 0.2 s for rank 0.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        started(port, 1, 0.0)
    monkeypatch.undo()
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(started, [port] * 2, range(2), [0.0, 0.2], [2] * 2)
    first.set("address", "here")
    assert second.get("address") == b"here"


def test_nothing_is_asked_without_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    assert start_store() == {}
