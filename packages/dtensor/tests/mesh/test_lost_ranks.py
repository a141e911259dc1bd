"""Ranks that have ended, do not answer, or wait elsewhere, as another rank sees them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist

from meshwright_dtensor.mesh.lost_ranks import LostRanks, in_words, kill_here


def ranks_of(count: int) -> list[LostRanks]:
    store: Any = dist.HashStore()  # type: ignore[attr-defined]
    return [LostRanks(store, rank, count) for rank in range(count)]


@contextmanager
def answering(*ranks: LostRanks) -> Iterator[None]:
    """Inside, these ranks answer."""
    over = threading.Event()

    def answer() -> None:
        while not over.is_set():
            for rank in ranks:
                rank.answer()
            time.sleep(0.01)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_rank_that_does_not_answer_is_named() -> None:
    zero, first, second, third = ranks_of(4)
    for rank in (zero, first, second, third):
        rank.announce()
    with answering(first, third):
        silent = zero.silent(1.0)
        assert silent == {2: (socket.gethostname(), os.getpid())}
        assert in_words(2, silent[2]).startswith(f"rank 2 (process {os.getpid()} on ")
    with answering(first, second, third):
        assert zero.silent(5.0) == {}


def test_two_that_ask_answer_each_other() -> None:
    zero, first = ranks_of(2)
    zero.announce()
    first.announce()
    told: list[Any] = []
    asking = threading.Thread(target=lambda: told.append(first.silent(5.0)))
    asking.start()
    assert zero.silent(5.0) == {}
    # so that the other first, if it was later, has its answer
    with answering(zero):
        asking.join()
    assert told == [{}]


def test_who_has_ended_or_never_began_is_not_silent() -> None:
    zero, first, second = ranks_of(3)
    first.announce()
    first.say_ended("ValueError: a mistake")
    first.say_ended("its script has come to its end")
    second.say_ended("")
    assert zero.silent(0.5) == {}
    assert zero.ended() == {1: "ValueError: a mistake"}
    assert first.ended(0.2) == {}


def test_places_are_those_of_notes_and_of_answers() -> None:
    zero, first, second = ranks_of(3)
    for rank in (first, second):
        rank.announce()
    first.say_waited("train.py:3, in main: loss.backward()")
    with answering(first, second):
        zero.silent(5.0)
    waited = zero.waited()
    assert waited[1] == "train.py:3, in main: loss.backward()" and "test_lost_ranks.py" in waited[2]


class Counted:
    """A store that counts its requests."""

    def __init__(self, store: Any) -> None:
        self.store, self.asked = store, 0

    def __getattr__(self, name: str) -> Any:
        self.asked += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("count", [4, 2000])
def test_many_ranks_take_as_many_requests_as_few(count: int) -> None:
    ranks = ranks_of(count)
    for rank in ranks[1:]:
        rank.announce()
    ranks[1].say_ended("ValueError: a mistake")
    zero = LostRanks(store := Counted(ranks[0].store), 0, count)
    zero.announce()
    assert zero.ended(0.0) == {1: "ValueError: a mistake"}
    assert len(zero.silent(0.0)) == count - 2 and set(zero.waited()) == set()
    assert store.asked < 30


def test_a_process_of_this_host_alone_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        kill_here(("elsewhere", process.pid))
        assert process.poll() is None
        kill_here((socket.gethostname(), process.pid))
        assert process.wait(10) == -9
    kill_here((socket.gethostname(), process.pid))


def test_a_note_that_never_arrives_hides_no_later_one() -> None:
    zero, first, second, third = ranks_of(4)
    first.say_ended("ValueError: a mistake")
    # rank 3 was killed between its number and its note
    zero.store.add("meshwright/endings", 1)
    second.say_ended("OSError: no space")
    assert zero.ended() == {1: "ValueError: a mistake", 2: "OSError: no space"}
    assert zero.ended(0.0) == {1: "ValueError: a mistake", 2: "OSError: no space"}
    # or it was late
    zero.store.set("meshwright/ended/3", "KeyError: 'x'")
    zero.store.set("meshwright/endings/2", "3")
    assert zero.ended(0.0)[3] == "KeyError: 'x'" and third.rank == 3
