"""Which ranks of a job have ended, or do not answer: asked through the store of the process group.

A thread of each rank answers (see `deadlock`), also where its main thread waits or computes. A process that was stopped, or whose
host or link is lost, does not.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch.distributed as dist

from meshwright_dtensor._torch.groups import default_store
from meshwright_dtensor.mesh.bounded_store import BoundedStore
from meshwright_dtensor.mesh.users_line import users_line

T = TypeVar("T")

ANSWER_SECONDS = 4.0
"""How long a rank may take to answer."""
LISTEN_SECONDS = 1.0
"""Between two looks of a rank for a question."""
ENDED_SECONDS = 1.0
"""How long the note of a rank that has ended may take to arrive, after its connections have closed."""
_QUESTION, _ANSWER, _ENDED, _ENDINGS, _PROCESS, _WAITED, _NOTE = (
    f"meshwright/{name}"
    for name in ("question", "answer/", "ended/", "endings", "process/", "waited/", "note/")
)


class LostRanks:
    """The ranks of this job, as one of them sees them. For one thread.

    What asks the store raises RuntimeError where it has ended or does not answer.

    Attributes:
        places: rank -> the line of the user's code in which it was when it answered last, of those that were asked.
    """

    def __init__(self, store: Any, rank: int, ranks: int) -> None:
        self.store, self.rank, self.ranks = store, rank, ranks
        self._answered = 0
        # rank -> its note, of those that have ended, as far as they were read
        self._notes: dict[int, str] = {}
        # how many notes there were when they were read last, and the numbers of those that had not arrived
        self._read, self._awaited = 0, set[int]()
        self.places: dict[int, str] = {}

    @staticmethod
    def of_job() -> LostRanks:
        """Those of the default process group, over a connection of its own."""
        return LostRanks.connector()()

    @staticmethod
    def connector() -> Callable[[], LostRanks]:
        """What makes such a connection, also when the process group has ended or is another one."""
        connect, rank, ranks = default_store().clone, dist.get_rank(), dist.get_world_size()
        return lambda: LostRanks(BoundedStore(connect), rank, ranks)

    def announce(self) -> None:
        """Say that this rank will answer."""
        self.store.set(f"{_ANSWER}{self.rank}", json.dumps([0, ""]))
        self.store.set(f"{_WAITED}{self.rank}", "")
        self.store.set(f"{_PROCESS}{self.rank}", json.dumps([socket.gethostname(), os.getpid()]))

    def answer(self) -> None:
        """Answer the last question, if there is a new one."""
        if self.store.check([_QUESTION]):
            question = int(self.store.get(_QUESTION))
            if question > self._answered:
                self._answered = question
                line = users_line(sys._current_frames().get(threading.main_thread().ident or 0))
                self.store.set(f"{_ANSWER}{self.rank}", json.dumps([question, ": ".join(filter(None, line))]))

    def say_ended(self, how: str) -> None:
        """Leave a note for the others, as this process ends; the first one stays. `how`: "" where others are the cause."""
        key = f"{_ENDED}{self.rank}"
        # where the store has ended, the job has
        with suppress(RuntimeError):
            if not self.store.check([key]):
                self.store.set(key, how)
                # so that nobody has to look for the notes of all ranks
                number = self.store.add(_ENDINGS, 1)
                self.store.set(f"{_ENDINGS}/{number}", str(self.rank))

    def ended(self, seconds: float = ENDED_SECONDS) -> dict[int, str]:
        """Rank -> its note, of the others that have ended. Waits for the first note up to `seconds`."""
        until = time.monotonic() + seconds
        while True:
            self._read_notes()
            told = {rank: note for rank, note in self._notes.items() if note and rank != self.rank}
            if told or time.monotonic() > until:
                return told
            time.sleep(0.1)

    def say_waited(self, place: str) -> None:
        """Leave a note in which line of the user's code this rank has waited for others, in vain."""
        self.store.set(f"{_WAITED}{self.rank}", place)

    def waited(self) -> dict[int, str]:
        """Rank -> where it has waited, or is, of all other ranks for which that is known; after `silent`."""
        keys = [f"{_WAITED}{rank}" for rank in range(self.ranks)]
        notes = dict(enumerate(self._texts(keys)))
        del notes[self.rank]
        return {rank: place for rank, note in notes.items() if (place := note or self.places.get(rank, ""))}

    def silent(self, seconds: float = ANSWER_SECONDS) -> dict[int, tuple[str, int]]:
        """Rank -> (host, process) of the ranks that have not ended, and do not answer within `seconds`."""
        question = self.store.add(_QUESTION, 1)
        self._read_notes()
        waiting = {}
        for rank, process in enumerate(self._texts([f"{_PROCESS}{rank}" for rank in range(self.ranks)])):
            if rank != self.rank and process and rank not in self._notes:
                host, pid = json.loads(process)
                waiting[rank] = (host, pid)
        until = time.monotonic() + seconds
        while waiting and time.monotonic() < until:
            time.sleep(0.1)
            # another rank may ask at the same time
            self.answer()
            answers = self.store.multi_get([f"{_ANSWER}{rank}" for rank in waiting])
            for rank, answer in zip(list(waiting), answers, strict=True):
                last, self.places[rank] = json.loads(answer)
                if last >= question:
                    del waiting[rank]
        return waiting

    def _read_notes(self) -> None:
        """Read the notes that have come since the last time."""
        there = self.store.add(_ENDINGS, 0)
        self._awaited.update(range(self._read + 1, there + 1))
        self._read = there
        for number in sorted(self._awaited):
            rank = self._text(f"{_ENDINGS}/{number}")
            # else it is being written, or its rank was killed meanwhile, which must not hide those that follow
            if rank is not None:
                self._notes[int(rank)] = self._text(f"{_ENDED}{rank}") or ""
                self._awaited.remove(number)

    def _texts(self, keys: list[str]) -> list[str]:
        """The values of keys, "" for one that is not there."""
        if self.store.check(keys):
            return [value.decode() for value in self.store.multi_get(keys)]
        return [self._text(key) or "" for key in keys]

    def _text(self, key: str) -> str | None:
        return self.store.get(key).decode() if self.store.check([key]) else None


def in_words(rank: int, process: tuple[str, int]) -> str:
    """A line about a rank that does not answer."""
    host, pid = process
    return f"rank {rank} (process {pid} on {host}) does not answer: it is stopped, or its host or its link is lost"


def kill_here(process: tuple[str, int]) -> None:
    """End a process that does not answer, if it is one of this host: a launcher waits half a minute for one that is stopped."""
    host, pid = process
    if host == socket.gethostname():
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


class JobNotes:
    """What a rank asks the others and leaves for them, where something has failed; the first question makes the connection.

    For one thread. Where there are no other ranks, or the store has ended, there is nothing to tell.
    """

    def __init__(self) -> None:
        self._lost: LostRanks | None = None

    def silent(self) -> list[str]:
        """Lines about the ranks that do not answer."""
        return self._ask(lambda lost: [in_words(*each) for each in lost.silent().items()], [])

    def leave(self, name: str, text: str) -> None:
        """Leave a text for the other ranks."""
        self._ask(lambda lost: lost.store.set(_NOTE + name, text), None)

    def text(self, name: str) -> str:
        """The text that another rank has left; "" without one."""
        return self._ask(lambda lost: lost._text(_NOTE + name) or "", "")

    def _ask(self, question: Callable[[LostRanks], T], default: T) -> T:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return default
        with suppress(RuntimeError):
            self._lost = self._lost or LostRanks.of_job()
            return question(self._lost)
        return default
