"""Fill what the ranks of one machine want from what is stored: each portion is read and checked by one of them, and handed on.

A rank reads its portions into slots of its memory, takes from there what it wants itself, and tells the others which portion lies
where; they take theirs and give the slot back.  Taking waits for nothing, so slots always come back, and nothing can lock up.
"""

from __future__ import annotations

import json
import mmap
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError, CorruptError, of_other
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.io.direct_read import ALIGN, PagedFile
from meshwright_checkpoint.io.host_memory import HUGE, aligned_memory, in_large_pages
from meshwright_checkpoint.read.destinations import Part, parts_of
from meshwright_checkpoint.read.node_peers import (
    BYE,
    FAILED,
    FREE,
    OVER,
    READY,
    WANTS,
    Line,
    Message,
    Neighbours,
)
from meshwright_checkpoint.read.plan import Portion, Runs, Stored, portions, runs
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_dtensor.errors import MeshwrightError

CHUNK = 8 * BLOCK
"""Most bytes read at a time: what threads of two ranks have read, and not yet copied, stays in a processor's cache."""
SLOTS = 6
"""Portions of one rank that are in memory at a time."""
DEEPER = 2
"""Times as many threads where most of what a rank reads is for itself alone: none waits for a slot or for another rank, so disks
have more to do at a time (loads took a tenth less); where it is handed on, they only stand in the way of those who take."""
WORTH = 64 * BLOCK
"""Bytes that a rank hands on from which it is worth having its slots in large pages: disks then read right into them."""
STRETCH = 64 * BLOCK
"""Bytes of a file that are read in the same way: to ask for every portion takes a tenth of what the load does."""


def step_of(members: int) -> int:
    """Most bytes of a portion where so many ranks share a machine: all slots together are as large as those of one alone."""
    return max(CHUNK // members // BLOCK, 2) * BLOCK


def slot_of(members: int) -> int:
    """Bytes of a slot: a portion, and the rest of the pages in which it begins and ends."""
    return step_of(members) + 2 * ALIGN


def memory_of(members: int) -> int:
    """Bytes of all slots of one rank: whole large pages."""
    return -(-SLOTS * slot_of(members) // HUGE) * HUGE


class StoppedError(CheckpointError):
    """Something else has failed, and been noted, already."""


class Filling:
    """One load of one rank.

    Args:
        store: what is read.
        wanted: what this rank wants of it.
        neighbours: the ranks of this machine that fill theirs at the same time; None reads alone.
        threads: that read at a time.
    """

    def __init__(
        self, store: Store, wanted: Sequence[Wanted], neighbours: Neighbours | None, threads: int
    ) -> None:
        self._store = store
        self._me = neighbours.me if neighbours else 0
        self._ranks = neighbours.ranks if neighbours else [0]
        self._lines: dict[int, Line] = neighbours.lines if neighbours else {}
        self._threads = min(threads, SLOTS)
        self._step, self._slot = step_of(len(self._ranks)), slot_of(len(self._ranks))
        self._large = False  # the slots of this rank lie in large pages
        self._memories = dict(neighbours.memories) if neighbours else {}
        self._parts = parts_of(store, wanted)
        self._wants: dict[int, Runs] = {}
        self._plan: list[Portion] | None = None
        self._left: list[int] = []
        self._ways: dict[tuple[str, int], bool] = {}  # around the system's cache, by file and stretch
        self._using: list[set[int]] = [set() for _ in range(SLOTS)]
        self._change = threading.Condition()
        self._over: set[int] = set()
        self._error: Exception | None = None
        self._culprit, self._blame = 0, b""

    def run(self) -> None:
        """Fill all targets. Raises what one rank of this machine has failed with on all: CorruptError, else CheckpointError."""
        hearing = [
            threading.Thread(target=self._guarded, args=(self._hear, *both), name="meshwright-take")
            for both in self._lines.items()
        ]
        for thread in hearing:
            thread.start()
        try:
            self._guarded(self._work)
        finally:
            if self._error is not None:
                self._give_up()
            for thread in hearing:
                thread.join()
            if self._error is not None:  # it may have come from a line, after the work
                self._give_up()
        if self._error is not None:
            raise self._error

    # --- failing ------------------------------------------------------------------------------------------------------

    def _guarded(self, work: Callable[..., None], *args: object) -> None:
        """`work`; the first error of all threads is kept, and ends the work of all."""
        try:
            work(*args)
        except StoppedError:
            pass
        except (
            Exception
        ) as error:  # storage libraries raise what they like, and other ranks wait to hear of it
            told = f"{type(error).__name__}: {error}"
            if not isinstance(error, (MeshwrightError, OSError)):
                cause, error = error, CheckpointError(told)
                error.__cause__ = cause
            self._fail(error, self._ranks[self._me], told.encode())
        except BaseException as error:
            self._fail(StoppedError("loading was interrupted"), self._ranks[self._me], repr(error).encode())
            raise

    def _fail(self, error: Exception, rank: int, text: bytes) -> None:
        with self._change:
            if self._error is None:
                self._error, self._culprit, self._blame = error, rank, text
            self._change.notify_all()

    def _give_up(self) -> None:
        for line in self._lines.values():
            line.send(FAILED, self._culprit, data=self._blame)
            line.hang_up()

    def _until(self, there: Callable[[], bool]) -> None:
        """With the condition held: wait. Raises StoppedError once something has failed."""
        self._change.wait_for(lambda: self._error is not None or there())
        if self._error is not None:
            raise StoppedError("stopped")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        mine = {stored: self._runs_of(stored, part) for stored, part in self._parts.items()}
        data = json.dumps([[s.file, s.offset, s.nbytes, pieces] for s, pieces in mine.items()]).encode()
        for line in self._lines.values():
            line.send(WANTS, data=data)
        with self._change:
            self._wants[self._me] = mine
            self._until(lambda: len(self._wants) == len(self._ranks))
            plan = portions([self._wants[member] for member in range(len(self._ranks))], self._step)
            self._left = [number for number, p in enumerate(plan) if p.reader == self._me][::-1]
            self._plan = plan
            self._change.notify_all()
        for number in self._left:
            self._store.file(plan[number].stored.file)  # opened, and its header checked, by one thread
        own = sum(p.nbytes for p in plan if p.takers == (self._me,))
        shared = sum(p.nbytes for p in plan if p.reader == self._me) - own
        if self._me not in self._memories:
            self._memories[self._me] = _alone(SLOTS * self._slot)
        elif shared >= WORTH:
            self._large = in_large_pages(self._memories[self._me])
        threads = self._threads * DEEPER if own > shared else self._threads
        with ThreadPoolExecutor(threads, thread_name_prefix="meshwright-load") as pool:
            for _ in range(min(threads, len(self._left))):
                pool.submit(self._guarded, self._read)
        with self._change:
            self._until(lambda: not any(self._using))
        for line in self._lines.values():
            line.send(OVER)
        with self._change:
            self._until(lambda: len(self._over) == len(self._lines))
        for line in self._lines.values():  # both have used all, so nothing more can come
            line.send(BYE)

    def _runs_of(self, stored: Stored, part: Part) -> list[tuple[int, int]]:
        found: set[tuple[int, int]] = set()
        for one in part.targets:
            found.update(runs(one.shape, one.dtype.itemsize, one.box, self._step))
        return sorted(found)

    def _read(self) -> None:
        """Read what is left, one portion after the other."""
        assert self._plan is not None
        pages: torch.Tensor | None = None  # of this thread, to read into around the system's cache
        while True:
            with self._change:
                if self._error is not None or not self._left:
                    return
                number = self._left.pop()
                portion = self._plan[number]
            around = self._around(portion)
            if portion.takers == (self._me,):
                target = (
                    None if around else self._parts[portion.stored].straight(portion.start, portion.nbytes)
                )
                if target is not None:
                    self._fetch(portion, target)
                    continue
            data: torch.Tensor | None = None
            if around is not None and not (self._large and len(portion.takers) > 1):
                if pages is None:
                    pages = aligned_memory(max(self._slot, HUGE))
                data = self._fetch_around(portion, around, pages)
                if portion.takers == (self._me,):
                    self._take(portion, data)
                    continue
            with self._change:
                self._until(lambda: set() in self._using)
                slot = self._using.index(set())
                self._using[slot] = set(portion.takers)
            handed = self._slot_data(portion, self._me, slot)
            if data is not None:
                handed.copy_(data)
            elif around is not None:
                self._fetch_around(portion, around, self._slot_pages(self._me, slot))
            else:
                self._fetch(portion, handed)
            for member in portion.takers:
                if member != self._me:
                    self._lines[member].send(READY, number, slot)
            self._take(portion, handed if data is None else data)
            self._used(slot, self._me)

    def _around(self, portion: Portion) -> PagedFile | None:
        """The file of a portion, where it is to be read around the system's cache."""
        file = self._store.file(portion.stored.file)
        if not isinstance(file, PagedFile):
            return None
        if portion.nbytes < self._step:
            return file if file.around(portion.at, portion.nbytes) else None
        place = (portion.stored.file, portion.at // STRETCH)
        if place not in self._ways:  # two threads may both ask
            self._ways[place] = file.around(portion.at, portion.nbytes)
        return file if self._ways[place] else None

    def _slot_pages(self, member: int, slot: int) -> torch.Tensor:
        """A slot of a member's memory; it starts with a page."""
        return self._memories[member][slot * self._slot :][: self._slot]

    def _slot_data(self, portion: Portion, member: int, slot: int) -> torch.Tensor:
        """Where a portion lies in a slot of a member's memory: as far from the start of a page as in its file."""
        return self._slot_pages(member, slot)[portion.at % ALIGN :][: portion.nbytes]

    def _fetch(self, portion: Portion, data: torch.Tensor) -> None:
        """Read a portion through the system's cache, and check it."""
        self._store.file(portion.stored.file).read_into(bytes_of_tensor(data), portion.at)
        self._check(portion, data)

    def _fetch_around(self, portion: Portion, file: PagedFile, pages: torch.Tensor) -> torch.Tensor:
        """Read a portion around the cache, into memory that starts with a page, and check it; where in there it lies."""
        file.read_pages(bytes_of_tensor(pages), portion.at, portion.nbytes)
        data = pages[portion.at % ALIGN :][: portion.nbytes]
        self._check(portion, data)
        return data

    def _check(self, portion: Portion, data: torch.Tensor) -> None:
        part = self._parts[portion.stored]
        if part.sums:
            first = portion.start // BLOCK * DIGITS
            if (
                block_sums(bytes_of_tensor(data))
                != part.sums[first : first + -(-portion.nbytes // BLOCK) * DIGITS]
            ):
                raise CorruptError(
                    f"{self._store.file(portion.stored.file).where}: the stored values of {part.key} are damaged (checksum "
                    f"differs at byte {portion.at} or up to {portion.nbytes} bytes later)"
                )

    def _take(self, portion: Portion, data: torch.Tensor) -> None:
        """Copy what is wanted here out of the bytes of a portion."""
        for target in self._parts[portion.stored].targets:
            target.take(portion.start, data)

    def _used(self, slot: int, member: int) -> None:
        with self._change:
            self._using[slot].discard(member)
            self._change.notify_all()

    # --- others -------------------------------------------------------------------------------------------------------

    def _hear(self, member: int, line: Line) -> None:
        """What another rank of this machine says, until it needs nothing more."""
        while True:
            message = line.receive()
            if message is None:
                text = b"it died while it loaded"
                self._fail(_failed(self._ranks[member], text), self._ranks[member], text)
                return
            if message.kind == BYE:
                return
            if message.kind == OVER:
                with self._change:
                    self._over.add(member)
                    self._change.notify_all()
            elif message.kind == FREE:
                self._used(message.second, member)
            elif message.kind == READY:
                self._taken(member, line, message)
            elif message.kind == WANTS:
                told = {Stored(*where): pieces for *where, pieces in json.loads(message.data)}
                with self._change:
                    self._wants[member] = told
                    self._change.notify_all()
            elif message.kind == FAILED:
                self._fail(_failed(message.first, message.data), message.first, message.data)
                return

    def _taken(self, member: int, line: Line, message: Message) -> None:
        with self._change:
            self._until(lambda: self._plan is not None)
        assert self._plan is not None
        portion = self._plan[message.first]
        self._take(portion, self._slot_data(portion, member, message.second))
        line.send(FREE, 0, message.second)


def _failed(rank: int, text: bytes) -> MeshwrightError:
    return of_other(rank, text.decode(errors="replace"))


def _alone(nbytes: int) -> torch.Tensor:
    """Memory for a rank that reads for itself; what it does not touch costs nothing."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
