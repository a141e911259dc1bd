"""Read boxes of the tensors of a checkpoint: only the blocks that are needed, each verified by its checksum.

Shared read: each chunk is read and verified by one rank of a machine, and the others copy it from shared memory.
A rank reads its chunks into slots of its shared memory and tells the ranks that need a chunk in which slot it is. They
copy their part and free the slot. Copying waits for nothing, so slots are always freed and there is no deadlock.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError, CorruptError, error_of_rank
from meshwright_checkpoint.format.checksum import BLOCK, DIGITS, block_sums
from meshwright_checkpoint.io.direct_read import ALIGN, DirectFile
from meshwright_checkpoint.io.host_memory import HUGE, aligned_memory, collapse_to_large_pages
from meshwright_checkpoint.read import node_peers
from meshwright_checkpoint.read.destinations import destinations_of
from meshwright_checkpoint.read.node_peers import NodePeers, PeerSocket
from meshwright_checkpoint.read.read_plan import ReadChunk, StoredRange, plan_reads, wanted_ranges
from meshwright_checkpoint.read.wanted import Store, Wanted
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.devices.storage_waits import waiting_for_storage
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.sharding.boxes import whole_box
from meshwright_dtensor.utils.process import usable_cores

CHUNK = 8 * BLOCK
"""Most bytes read at a time. With two ranks, the bytes read and not yet copied fit in the CPU cache."""
SLOTS = 6
"""Chunks of one rank that are in memory at a time."""
PRIVATE_READ_FACTOR = 2
"""More threads if a rank reads mostly for itself: they wait for no slot and no other rank, and the disk gets more
requests at a time (loads took 10% less time). In a shared read, more threads only slow down the copying ones."""
LARGE_PAGES_NBYTES = 64 * BLOCK
"""Bytes read for other ranks from which the slots are put into large pages. Disks then read directly into them."""
CACHE_PROBE_NBYTES = 64 * BLOCK
"""Bytes of a file that share one look-up in the page cache: one per chunk takes a tenth of the load's time."""


def chunk_nbytes(members: int) -> int:
    """Most bytes of a chunk with so many ranks on a machine: all their slots together are as large as those of one."""
    return max(CHUNK // members // BLOCK, 2) * BLOCK


def slot_nbytes(members: int) -> int:
    """Bytes of a slot: a chunk, and the rest of its first and last page."""
    return chunk_nbytes(members) + 2 * ALIGN


def slots_nbytes(members: int) -> int:
    """Bytes of all slots of one rank, in whole large pages."""
    return -(-SLOTS * slot_nbytes(members) // HUGE) * HUGE


def reader_threads(ranks: int) -> int:
    """Number of reading threads of one of `ranks` ranks on this machine: its share of the cores, but at least 3.

    Three keep the disk busy while earlier blocks are verified.
    """
    return max(3, min(4, usable_cores() // ranks))


@waiting_for_storage()
def read(store: Store, wanted: Sequence[Wanted], peers: NodePeers | None = None) -> None:
    """Fill every target. With `peers` all ranks of this machine call it at the same time, and one reads shared bytes.

    Extra memory: the slots of `SharedRead`, 52 MiB for two ranks of a machine together, 14 MiB per rank from four on, and one
    chunk in each thread that bypasses the page cache.

    Raises:
        CorruptError: stored values are damaged; the message names the tensor.
        CheckpointError: another rank of this machine failed.
    """
    launched = os.environ.get("LOCAL_WORLD_SIZE", "")
    local_ranks = len(peers.ranks) if peers else int(launched) if launched.isdigit() else 1
    SharedRead(store, wanted, peers, reader_threads(max(local_ranks, 1))).run()


def read_tensors(store: Store, keys: Sequence[str]) -> dict[str, torch.Tensor]:
    """Read whole tensors. Raises CorruptError, also for a missing key."""
    missing = [key for key in keys if key not in store.tensors]
    if missing:
        raise CorruptError(f"{store.where} refers to {missing[0]}, which is not in the checkpoint")
    tensors = {
        key: torch.empty(store.tensors[key].shape, dtype=store.tensors[key].dtype, device=HOST)
        for key in keys
    }
    read(store, [Wanted(key, whole_box(tensor.shape), tensor) for key, tensor in tensors.items()])
    return tensors


class StoppedError(CheckpointError):
    """Stops a thread after another error, which is already recorded."""


class SharedRead:
    """The reads of one load on one rank. `peers`: the ranks of this machine that read at the same time; None reads alone."""

    def __init__(self, store: Store, wanted: Sequence[Wanted], peers: NodePeers | None, threads: int) -> None:
        self._store = store
        self._me = peers.me if peers else 0
        self._peer_ranks = peers.ranks if peers else [0]
        self._sockets: dict[int, PeerSocket] = peers.sockets if peers else {}
        self._threads = min(threads, SLOTS)
        self._chunk_nbytes = chunk_nbytes(len(self._peer_ranks))
        self._slot_nbytes = slot_nbytes(len(self._peer_ranks))
        # whether the slots of this rank are in large pages
        self._large_pages = False
        self._memories = dict(peers.memories) if peers else {}
        self._parts = destinations_of(store, wanted)
        self._wants: dict[int, dict[StoredRange, list[tuple[int, int]]]] = {}
        self._plan: list[ReadChunk] | None = None
        self._todo: list[int] = []
        # (file, number of the CACHE_PROBE_NBYTES range) -> whether to bypass the page cache
        self._direct_ranges: dict[tuple[str, int], bool] = {}
        self._slot_users: list[set[int]] = [set() for _ in range(SLOTS)]
        self._changed = threading.Condition()
        self._drained: set[int] = set()
        self._error: Exception | None = None
        self._failed_rank, self._failure = 0, b""

    def run(self) -> None:
        """Fill all targets. If one rank of this machine fails, all raise: CorruptError, or else CheckpointError."""
        receiver = partial(threading.Thread, target=self._run_guarded, name="meshwright-take")
        receivers = [receiver(args=(self._receive_from, *item)) for item in self._sockets.items()]
        for thread in receivers:
            thread.start()
        try:
            self._run_guarded(self._read_all)
        finally:
            if self._error is not None:
                self._abort_peers()
            for thread in receivers:
                thread.join()
            # a receiver may have failed after the work
            if self._error is not None:
                self._abort_peers()
        if self._error is not None:
            raise self._error

    # --- failures --------------------

    def _run_guarded(self, work: Callable[..., None], *args: object) -> None:
        """Run `work`. The first error of all threads is recorded and stops all of them."""
        try:
            work(*args)
        except StoppedError:
            pass
        # storage libraries may raise anything, and the other ranks must be told
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, (MeshwrightError, OSError)):
                cause, error = error, CheckpointError(text)
                error.__cause__ = cause
            self._fail(error, self._peer_ranks[self._me], text.encode())
        except BaseException as error:
            stopped = StoppedError("loading was interrupted")
            self._fail(stopped, self._peer_ranks[self._me], repr(error).encode())
            raise

    def _fail(self, error: Exception, rank: int, text: bytes) -> None:
        with self._changed:
            if self._error is None:
                self._error, self._failed_rank, self._failure = error, rank, text
            self._changed.notify_all()

    def _abort_peers(self) -> None:
        for peer in self._sockets.values():
            peer.send(node_peers.FAILED, self._failed_rank, data=self._failure)
            peer.shut_down()

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        """Wait for a change of this thread or others. Raises StoppedError after a failure."""
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or reached())
            if self._error is not None:
                raise StoppedError("stopped")

    # --- reading --------------------

    def _read_all(self) -> None:
        mine: dict[StoredRange, list[tuple[int, int]]] = {}
        for stored, part in self._parts.items():
            ranges: set[tuple[int, int]] = set()
            for d in part.destinations:
                ranges.update(wanted_ranges(d.shape, d.dtype.itemsize, d.box, self._chunk_nbytes))
            mine[stored] = sorted(ranges)
        data = json.dumps([[s.file, s.offset, s.nbytes, pieces] for s, pieces in mine.items()]).encode()
        for peer in self._sockets.values():
            peer.send(node_peers.WANTS, data=data)
        with self._changed:
            self._wants[self._me] = mine
            self._wait_until(lambda: len(self._wants) == len(self._peer_ranks))
            wants = [self._wants[member] for member in range(len(self._peer_ranks))]
            plan = plan_reads(wants, self._chunk_nbytes)
            self._todo = [number for number, p in enumerate(plan) if p.reader == self._me][::-1]
            self._plan = plan
            self._changed.notify_all()
        for number in self._todo:
            # open files, and check their headers, in one thread
            self._store.file(plan[number].stored.file)
        private_nbytes = sum(p.nbytes for p in plan if p.consumers == (self._me,))
        shared_nbytes = sum(p.nbytes for p in plan if p.reader == self._me) - private_nbytes
        if self._me not in self._memories:
            # pages that are not touched cost nothing
            memory = mmap.mmap(-1, SLOTS * self._slot_nbytes)
            self._memories[self._me] = torch.frombuffer(memory, dtype=torch.uint8)
        elif shared_nbytes >= LARGE_PAGES_NBYTES:
            self._large_pages = collapse_to_large_pages(self._memories[self._me])
        threads = self._threads * PRIVATE_READ_FACTOR if private_nbytes > shared_nbytes else self._threads
        with ThreadPoolExecutor(threads, thread_name_prefix="meshwright-load") as pool:
            for _ in range(min(threads, len(self._todo))):
                pool.submit(self._run_guarded, self._read_chunks)
        self._wait_until(lambda: not any(self._slot_users))
        for peer in self._sockets.values():
            peer.send(node_peers.DRAINED)
        self._wait_until(lambda: len(self._drained) == len(self._sockets))
        # all ranks have copied everything, so no message follows
        for peer in self._sockets.values():
            peer.send(node_peers.BYE)

    def _read_chunks(self) -> None:
        """Read the remaining chunks, one after the other."""
        assert self._plan is not None
        # buffer of this thread for reads that bypass the page cache
        pages: torch.Tensor | None = None
        while True:
            with self._changed:
                if self._error is not None or not self._todo:
                    return
                number = self._todo.pop()
                chunk = self._plan[number]
            direct_file = self._direct_file(chunk)
            if chunk.consumers == (self._me,):
                part = self._parts[chunk.stored]
                target = None if direct_file else part.contiguous_view(chunk.start, chunk.nbytes)
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
                    self._sockets[member].send(node_peers.READY, number, slot)
            self._copy_out(chunk, slot_data if data is None else data)
            self._release_slot(slot, self._me)

    def _direct_file(self, chunk: ReadChunk) -> DirectFile | None:
        """The file of a chunk, if it should be read directly, without the page cache."""
        file = self._store.file(chunk.stored.file)
        if not isinstance(file, DirectFile):
            return None
        if chunk.nbytes < self._chunk_nbytes:
            return file if file.prefers_direct(chunk.at, chunk.nbytes) else None
        probe_key = (chunk.stored.file, chunk.at // CACHE_PROBE_NBYTES)
        # two threads may look it up
        if probe_key not in self._direct_ranges:
            self._direct_ranges[probe_key] = file.prefers_direct(chunk.at, chunk.nbytes)
        return file if self._direct_ranges[probe_key] else None

    def _slot_pages(self, member: int, slot: int) -> torch.Tensor:
        """A slot of a member's memory; page-aligned."""
        return self._memories[member][slot * self._slot_nbytes :][: self._slot_nbytes]

    def _slot_data(self, chunk: ReadChunk, member: int, slot: int) -> torch.Tensor:
        """The bytes of a chunk in a slot of a member: at the same offset in a page as in the file."""
        return self._slot_pages(member, slot)[chunk.at % ALIGN :][: chunk.nbytes]

    def _fetch(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        """Read a chunk through the page cache, and verify it."""
        self._store.file(chunk.stored.file).read_into(bytes_of_tensor(data), chunk.at)
        self._check(chunk, data)

    def _fetch_direct(self, chunk: ReadChunk, file: DirectFile, pages: torch.Tensor) -> torch.Tensor:
        """Read a chunk directly into page-aligned memory, and verify it. Returns its bytes in that memory."""
        file.read_pages(bytes_of_tensor(pages), chunk.at, chunk.nbytes)
        data = pages[chunk.at % ALIGN :][: chunk.nbytes]
        self._check(chunk, data)
        return data

    def _check(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        part = self._parts[chunk.stored]
        if part.sums:
            first = chunk.start // BLOCK * DIGITS
            expected = part.sums[first : first + -(-chunk.nbytes // BLOCK) * DIGITS]
            if block_sums(bytes_of_tensor(data)) != expected:
                raise CorruptError(
                    f"{self._store.file(chunk.stored.file).where}: the stored values of {part.key} are damaged (checksum "
                    f"differs at byte {chunk.at} or up to {chunk.nbytes} bytes later)"
                )

    def _copy_out(self, chunk: ReadChunk, data: torch.Tensor) -> None:
        """Copy the parts of a chunk that this rank wants."""
        for destination in self._parts[chunk.stored].destinations:
            destination.copy_from(chunk.start, data)

    def _release_slot(self, slot: int, member: int) -> None:
        with self._changed:
            self._slot_users[slot].discard(member)
            self._changed.notify_all()

    # --- other ranks of the machine --------------------

    def _receive_from(self, member: int, peer: PeerSocket) -> None:
        """Handle the messages of another rank of this machine until it says BYE."""
        while True:
            message = peer.receive()
            if message is None:
                self._fail_by_rank(self._peer_ranks[member], b"the process died during the load")
                return
            kind, first, second, data = message
            if kind == node_peers.BYE:
                return
            if kind == node_peers.DRAINED:
                with self._changed:
                    self._drained.add(member)
                    self._changed.notify_all()
            elif kind == node_peers.FREE:
                self._release_slot(second, member)
            elif kind == node_peers.READY:
                self._wait_until(lambda: self._plan is not None)
                assert self._plan is not None
                chunk = self._plan[first]
                self._copy_out(chunk, self._slot_data(chunk, member, second))
                peer.send(node_peers.FREE, 0, second)
            elif kind == node_peers.WANTS:
                ranges = {StoredRange(*where): pieces for *where, pieces in json.loads(data)}
                with self._changed:
                    self._wants[member] = ranges
                    self._changed.notify_all()
            elif kind == node_peers.FAILED:
                self._fail_by_rank(first, data)
                return

    def _fail_by_rank(self, rank: int, text: bytes) -> None:
        self._fail(error_of_rank(rank, text.decode(errors="replace")), rank, text)
