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
from meshwright_checkpoint.errors import CheckpointError, CorruptError, error_of_rank
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.io.direct_read import ALIGN, DirectFile
from meshwright_checkpoint.io.host_memory import HUGE, aligned_memory, collapse_to_large_pages
from meshwright_checkpoint.read.destinations import Part, destinations_of
from meshwright_checkpoint.read.node_peers import (
    BYE,
    DRAINED,
    FAILED,
    FREE,
    READY,
    WANTS,
    Message,
    NodePeers,
    PeerSocket,
)
from meshwright_checkpoint.read.plan import ReadChunk, Stored, WantedRanges, plan_reads, wanted_ranges
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_dtensor.errors import MeshwrightError

CHUNK = 8 * BLOCK
"""Most bytes read at a time: what threads of two ranks have read, and not yet copied, stays in a processor's cache."""
SLOTS = 6
"""Portions of one rank that are in memory at a time."""
PRIVATE_READ_FACTOR = 2
"""Times as many threads where most of what a rank reads is for itself alone: none waits for a slot or for another rank, so disks
have more to do at a time (loads took a tenth less); where it is handed on, they only stand in the way of those who take."""
LARGE_PAGES_NBYTES = 64 * BLOCK
"""Bytes that a rank hands on from which it is worth having its slots in large pages: disks then read right into them."""
CACHE_PROBE_NBYTES = 64 * BLOCK
"""Bytes of a file that are read in the same way: to ask for every portion takes a tenth of what the load does."""


def chunk_nbytes(members: int) -> int:
    """Most bytes of a portion where so many ranks share a machine: all slots together are as large as those of one alone."""
    return max(CHUNK // members // BLOCK, 2) * BLOCK


def slot_nbytes(members: int) -> int:
    """Bytes of a slot: a portion, and the rest of the pages in which it begins and ends."""
    return chunk_nbytes(members) + 2 * ALIGN


def slots_nbytes(members: int) -> int:
    """Bytes of all slots of one rank: whole large pages."""
    return -(-SLOTS * slot_nbytes(members) // HUGE) * HUGE


class StoppedError(CheckpointError):
    """Something else has failed, and been noted, already."""


class SharedRead:
    """One load of one rank.

    Args:
        store: what is read.
        wanted: what this rank wants of it.
        neighbours: the ranks of this machine that fill theirs at the same time; None reads alone.
        threads: that read at a time.
    """

    def __init__(self, store: Store, wanted: Sequence[Wanted], peers: NodePeers | None, threads: int) -> None:
        self._store = store
        self._me = peers.me if peers else 0
        self._peer_ranks = peers.ranks if peers else [0]
        self._sockets: dict[int, PeerSocket] = peers.sockets if peers else {}
        self._threads = min(threads, SLOTS)
        self._chunk_nbytes, self._slot_nbytes = (
            chunk_nbytes(len(self._peer_ranks)),
            slot_nbytes(len(self._peer_ranks)),
        )
        self._large_pages = False  # the slots of this rank lie in large pages
        self._memories = dict(peers.memories) if peers else {}
        self._parts = destinations_of(store, wanted)
        self._wants: dict[int, WantedRanges] = {}
        self._plan: list[ReadChunk] | None = None
        self._todo: list[int] = []
        self._direct_ranges: dict[
            tuple[str, int], bool
        ] = {}  # around the system's cache, by file and stretch
        self._slot_users: list[set[int]] = [set() for _ in range(SLOTS)]
        self._changed = threading.Condition()
        self._drained: set[int] = set()
        self._error: Exception | None = None
        self._failed_rank, self._failure = 0, b""

    def run(self) -> None:
        """Fill all targets. Raises what one rank of this machine has failed with on all: CorruptError, else CheckpointError."""
        receivers = [
            threading.Thread(
                target=self._run_guarded, args=(self._receive_from, *both), name="meshwright-take"
            )
            for both in self._sockets.items()
        ]
        for thread in receivers:
            thread.start()
        try:
            self._run_guarded(self._work)
        finally:
            if self._error is not None:
                self._abort_peers()
            for thread in receivers:
                thread.join()
            if self._error is not None:  # it may have come from a line, after the work
                self._abort_peers()
        if self._error is not None:
            raise self._error

    # --- failing ------------------------------------------------------------------------------------------------------

    def _run_guarded(self, work: Callable[..., None], *args: object) -> None:
        """`work`; the first error of all threads is kept, and ends the work of all."""
        try:
            work(*args)
        except StoppedError:
            pass
        except (
            Exception
        ) as error:  # storage libraries raise what they like, and other ranks wait to hear of it
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, (MeshwrightError, OSError)):
                cause, error = error, CheckpointError(text)
                error.__cause__ = cause
            self._fail(error, self._peer_ranks[self._me], text.encode())
        except BaseException as error:
            self._fail(
                StoppedError("loading was interrupted"), self._peer_ranks[self._me], repr(error).encode()
            )
            raise

    def _fail(self, error: Exception, rank: int, text: bytes) -> None:
        with self._changed:
            if self._error is None:
                self._error, self._failed_rank, self._failure = error, rank, text
            self._changed.notify_all()

    def _abort_peers(self) -> None:
        for peer in self._sockets.values():
            peer.send(FAILED, self._failed_rank, data=self._failure)
            peer.shut_down()

    def _wait_until(self, there: Callable[[], bool]) -> None:
        """With the condition held: wait. Raises StoppedError once something has failed."""
        self._changed.wait_for(lambda: self._error is not None or there())
        if self._error is not None:
            raise StoppedError("stopped")

    # --- reading ------------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        mine = {stored: self._runs_of(stored, part) for stored, part in self._parts.items()}
        data = json.dumps([[s.file, s.offset, s.nbytes, pieces] for s, pieces in mine.items()]).encode()
        for peer in self._sockets.values():
            peer.send(WANTS, data=data)
        with self._changed:
            self._wants[self._me] = mine
            self._wait_until(lambda: len(self._wants) == len(self._peer_ranks))
            plan = plan_reads(
                [self._wants[member] for member in range(len(self._peer_ranks))], self._chunk_nbytes
            )
            self._todo = [number for number, p in enumerate(plan) if p.reader == self._me][::-1]
            self._plan = plan
            self._changed.notify_all()
        for number in self._todo:
            self._store.file(plan[number].stored.file)  # opened, and its header checked, by one thread
        private_nbytes = sum(p.nbytes for p in plan if p.consumers == (self._me,))
        shared_nbytes = sum(p.nbytes for p in plan if p.reader == self._me) - private_nbytes
        if self._me not in self._memories:
            self._memories[self._me] = _alone(SLOTS * self._slot_nbytes)
        elif shared_nbytes >= LARGE_PAGES_NBYTES:
            self._large_pages = collapse_to_large_pages(self._memories[self._me])
        threads = self._threads * PRIVATE_READ_FACTOR if private_nbytes > shared_nbytes else self._threads
        with ThreadPoolExecutor(threads, thread_name_prefix="meshwright-load") as pool:
            for _ in range(min(threads, len(self._todo))):
                pool.submit(self._run_guarded, self._read)
        with self._changed:
            self._wait_until(lambda: not any(self._slot_users))
        for peer in self._sockets.values():
            peer.send(DRAINED)
        with self._changed:
            self._wait_until(lambda: len(self._drained) == len(self._sockets))
        for peer in self._sockets.values():  # both have used all, so nothing more can come
            peer.send(BYE)

    def _runs_of(self, stored: Stored, part: Part) -> list[tuple[int, int]]:
        ranges: set[tuple[int, int]] = set()
        for destination in part.targets:
            ranges.update(
                wanted_ranges(
                    destination.shape, destination.dtype.itemsize, destination.box, self._chunk_nbytes
                )
            )
        return sorted(ranges)

    def _read(self) -> None:
        """Read what is left, one portion after the other."""
        assert self._plan is not None
        pages: torch.Tensor | None = None  # of this thread, to read into around the system's cache
        while True:
            with self._changed:
                if self._error is not None or not self._todo:
                    return
                number = self._todo.pop()
                chunk = self._plan[number]
            direct_file = self._direct(chunk)
            if chunk.consumers == (self._me,):
                target = (
                    None if direct_file else self._parts[chunk.stored].straight(chunk.start, chunk.nbytes)
                )
                if target is not None:
                    self._fetch(chunk, target)
                    continue
            data: torch.Tensor | None = None
            if direct_file is not None and not (self._large_pages and len(chunk.consumers) > 1):
                if pages is None:
                    pages = aligned_memory(max(self._slot_nbytes, HUGE))
                data = self._fetch_direct(chunk, direct_file, pages)
                if chunk.consumers == (self._me,):
                    self._copy_out(chunk, data)
                    continue
            with self._changed:
                self._wait_until(lambda: set() in self._slot_users)
                slot = self._slot_users.index(set())
                self._slot_users[slot] = set(chunk.consumers)
            slot_data = self._slot_data(chunk, self._me, slot)
            if data is not None:
                slot_data.copy_(data)
            elif direct_file is not None:
                self._fetch_direct(chunk, direct_file, self._slot_pages(self._me, slot))
            else:
                self._fetch(chunk, slot_data)
            for member in chunk.consumers:
                if member != self._me:
                    self._sockets[member].send(READY, number, slot)
            self._copy_out(chunk, slot_data if data is None else data)
            self._release_slot(slot, self._me)

    def _direct(self, chunk: ReadChunk) -> DirectFile | None:
        """The file of a portion, where it is to be read around the system's cache."""
        file = self._store.file(chunk.stored.file)
        if not isinstance(file, DirectFile):
            return None
        if chunk.nbytes < self._chunk_nbytes:
            return file if file.prefers_direct(chunk.at, chunk.nbytes) else None
        place = (chunk.stored.file, chunk.at // CACHE_PROBE_NBYTES)
        if place not in self._direct_ranges:  # two threads may both ask
            self._direct_ranges[place] = file.prefers_direct(chunk.at, chunk.nbytes)
        return file if self._direct_ranges[place] else None

    def _slot_pages(self, member: int, slot: int) -> torch.Tensor:
        """A slot of a member's memory; it starts with a page."""
        return self._memories[member][slot * self._slot_nbytes :][: self._slot_nbytes]

    def _slot_data(self, chunk: ReadChunk, member: int, slot: int) -> torch.Tensor:
        """Where a portion lies in a slot of a member's memory: as far from the start of a page as in its file."""
        return self._slot_pages(member, slot)[chunk.at % ALIGN :][: chunk.nbytes]

    def _fetch(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        """Read a portion through the system's cache, and check it."""
        self._store.file(chunk.stored.file).read_into(bytes_of_tensor(data), chunk.at)
        self._check(chunk, data)

    def _fetch_direct(self, chunk: ReadChunk, file: DirectFile, pages: torch.Tensor) -> torch.Tensor:
        """Read a portion around the cache, into memory that starts with a page, and check it; where in there it lies."""
        file.read_pages(bytes_of_tensor(pages), chunk.at, chunk.nbytes)
        data = pages[chunk.at % ALIGN :][: chunk.nbytes]
        self._check(chunk, data)
        return data

    def _check(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        part = self._parts[chunk.stored]
        if part.sums:
            first = chunk.start // BLOCK * DIGITS
            if (
                block_sums(bytes_of_tensor(data))
                != part.sums[first : first + -(-chunk.nbytes // BLOCK) * DIGITS]
            ):
                raise CorruptError(
                    f"{self._store.file(chunk.stored.file).where}: the stored values of {part.key} are damaged (checksum "
                    f"differs at byte {chunk.at} or up to {chunk.nbytes} bytes later)"
                )

    def _copy_out(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        """Copy what is wanted here out of the bytes of a portion."""
        for target in self._parts[chunk.stored].targets:
            target.take(chunk.start, data)

    def _release_slot(self, slot: int, member: int) -> None:
        with self._changed:
            self._slot_users[slot].discard(member)
            self._changed.notify_all()

    # --- others -------------------------------------------------------------------------------------------------------

    def _receive_from(self, member: int, peer: PeerSocket) -> None:
        """What another rank of this machine says, until it needs nothing more."""
        while True:
            message = peer.receive()
            if message is None:
                text = b"it died while it loaded"
                self._fail(_failed(self._peer_ranks[member], text), self._peer_ranks[member], text)
                return
            if message.kind == BYE:
                return
            if message.kind == DRAINED:
                with self._changed:
                    self._drained.add(member)
                    self._changed.notify_all()
            elif message.kind == FREE:
                self._release_slot(message.second, member)
            elif message.kind == READY:
                self._take_from_peer(member, peer, message)
            elif message.kind == WANTS:
                ranges = {Stored(*where): pieces for *where, pieces in json.loads(message.data)}
                with self._changed:
                    self._wants[member] = ranges
                    self._changed.notify_all()
            elif message.kind == FAILED:
                self._fail(_failed(message.first, message.data), message.first, message.data)
                return

    def _take_from_peer(self, member: int, peer: PeerSocket, message: Message) -> None:
        with self._changed:
            self._wait_until(lambda: self._plan is not None)
        assert self._plan is not None
        chunk = self._plan[message.first]
        self._copy_out(chunk, self._slot_data(chunk, member, message.second))
        peer.send(FREE, 0, message.second)


def _failed(rank: int, text: bytes) -> MeshwrightError:
    return error_of_rank(rank, text.decode(errors="replace"))


def _alone(nbytes: int) -> torch.Tensor:
    """Memory for a rank that reads for itself; what it does not touch costs nothing."""
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
