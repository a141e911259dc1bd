"""Shared reads from one store, each block read once. Threads act as the ranks of a machine."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
import torch

from meshwright_checkpoint._torch import bytes_of_tensor
from meshwright_checkpoint.errors import CheckpointError, CorruptError
from meshwright_checkpoint.format.checksum import BLOCK, block_sums
from meshwright_checkpoint.io.direct_read import ALIGN
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.read import shared_read
from meshwright_checkpoint.read.node_peers import NodePeers, connect_node_peers
from meshwright_checkpoint.read.shared_read import SharedRead, read, slots_nbytes
from meshwright_checkpoint.read.wanted import Fragment, Source, Wanted
from meshwright_dtensor.sharding.boxes import Box, slice_of, whole_box

SHAPES: dict[str, tuple[int, ...]] = {
    "even": (512, 4096),
    "odd": (701, 1003),
    "long": (2, 700_001),
    "deep": (7, 11, 13, 401),
    "scalar": (),
    "empty": (0, 4),
}


class Gathering(Ranks):
    """Gathers between threads, as ranks do."""

    def __init__(self, rank: int, size: int, told: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self.told, self.barrier = rank, size, told, barrier

    def gather(self, value: Any) -> list[Any]:
        """See Ranks."""
        self.told[self.rank] = value
        self.barrier.wait(20)
        values = list(self.told)
        self.barrier.wait(20)
        return values


class Memory:
    """A store of tensors, each in two fragments of one file; counts what is read."""

    where = "memory"

    def __init__(self, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.nbytes, self.read, self.broken, self.lock = 0, 0, -1, threading.Lock()
        self.values, self.tensors = {}, {}
        chunks: list[bytes] = []
        for key, shape in SHAPES.items():
            value = torch.randint(0, 100, shape, generator=generator).to(dtype)
            fragments = []
            for box in _halves(shape):
                data = bytes(bytes_of_tensor(slice_of(value, box).contiguous()))
                fragments.append(Fragment(box, "file", self.nbytes, block_sums(memoryview(data))))
                chunks.append(data)
                self.nbytes += len(data)
            self.values[key], self.tensors[key] = value, Source(shape, dtype, tuple(fragments))
        self.data = b"".join(chunks)

    def file(self, name: str) -> Any:
        """See Store."""
        return self

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """See ReadFile."""
        with self.lock:
            self.read += len(buffer)
        buffer[:] = self.data[offset : offset + len(buffer)]
        if offset <= self.broken < offset + len(buffer):
            buffer[self.broken - offset] ^= 1

    def close(self) -> None:
        """See ReadFile."""


def _halves(shape: tuple[int, ...]) -> list[Box]:
    if not shape:
        return [()]
    half = shape[0] // 2
    rest = whole_box(shape[1:])
    return [((0, half), *rest), ((half, shape[0] - half), *rest)] if half else []


def together(size: int, work: Callable[[Ranks], Any]) -> list[Any]:
    """The result or the error of `work` on each of `size` threads."""
    told: list[Any] = [None] * size
    barrier = threading.Barrier(size)
    results: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(Gathering(rank, size, told, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    return results


def boxes_of(rng: random.Random, shape: tuple[int, ...]) -> list[Box]:
    boxes: list[Box] = []
    for _ in range(rng.randrange(3)):
        if 0 not in shape:
            starts = [rng.randrange(size) for size in shape]
            boxes.append(tuple((at, rng.randint(1, n - at)) for at, n in zip(starts, shape, strict=True)))
    return [*boxes, whole_box(shape)] if rng.random() < 0.3 else boxes


def wanted_by(rng: random.Random, store: Memory) -> list[Wanted]:
    return [
        Wanted(key, box, torch.zeros([n for _, n in box], dtype=store.values[key].dtype))
        for key, shape in SHAPES.items()
        for box in boxes_of(rng, shape)
    ]


@contextmanager
def joined(ranks: Ranks) -> Iterator[NodePeers | None]:
    peers = connect_node_peers(ranks, "test", slots_nbytes)
    try:
        yield peers
    finally:
        if peers is not None:
            peers.close()


def check(store: Memory, wanted: list[Wanted]) -> None:
    for want in wanted:
        assert torch.equal(want.target, slice_of(store.values[want.key], want.box)), want.key


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_shared_read_fills_any_boxes(dtype: torch.dtype, size: int) -> None:
    store = Memory(dtype)

    def work(ranks: Ranks) -> None:
        rng = random.Random(ranks.rank)
        for _ in range(3):
            wanted = wanted_by(rng, store)
            with joined(ranks) as peers:
                assert (peers is None) == (size == 1)
                read(store, wanted, peers)
            check(store, wanted)

    assert together(size, work) == [None] * size


def columns(ranks: Ranks, store: Memory) -> list[Wanted]:
    rows, width = SHAPES["even"]
    box = ((0, rows), (ranks.rank * width // ranks.size, width // ranks.size))
    return [Wanted("even", box, torch.zeros(rows, width // ranks.size))]


def test_shared_read_reads_each_block_once() -> None:
    store = Memory(torch.float32)
    nbytes = 4 * 512 * 4096

    def work(ranks: Ranks) -> None:
        wanted = columns(ranks, store)
        with joined(ranks) as peers:
            read(store, wanted, peers)
        check(store, wanted)

    def alone(ranks: Ranks) -> None:
        read(store, columns(ranks, store))

    assert together(4, work) == [None] * 4
    assert store.read == nbytes
    assert together(4, alone) == [None] * 4
    assert store.read == 5 * nbytes


def test_ranks_that_load_another_checkpoint_are_not_peers() -> None:
    def work(ranks: Ranks) -> list[int]:
        peers = connect_node_peers(ranks, f"checkpoint {ranks.rank % 2}", slots_nbytes)
        assert peers is not None
        with closing(peers):
            return peers.ranks

    assert together(5, work) == [[0, 2, 4], [1, 3], [0, 2, 4], [1, 3], [0, 2, 4]]


def test_damage_raises_on_all_peers() -> None:
    store = Memory(torch.float32)
    store.broken = 100

    def work(ranks: Ranks) -> None:
        with joined(ranks) as peers:
            SharedRead(store, columns(ranks, store), peers, 2).run()

    errors = together(3, work)
    assert [type(error) for error in errors] == [
        CorruptError
    ] * 3  # all ranks can load another checkpoint then
    assert all("the stored values of even are damaged" in str(error) for error in errors)
    assert str(errors[1]).startswith("rank 0 failed: CorruptError")


def test_closed_peer_ends_the_read_on_all() -> None:
    store = Memory(torch.float32)

    def work(ranks: Ranks) -> None:
        with joined(ranks) as peers:
            if ranks.rank != 1:  # rank 1 closes its sockets, as if its process died
                SharedRead(store, columns(ranks, store), peers, 2).run()

    errors = together(3, work)
    assert errors[1] is None
    for error in (errors[0], errors[2]):
        assert isinstance(error, CheckpointError) and "rank 1 failed" in str(error)


class Paged(Memory):
    """A store with direct reads; records the calls of prefers_direct."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.asked: list[int] = []
        self.pages = 0

    def prefers_direct(self, offset: int, nbytes: int) -> bool:
        """See DirectFile."""
        self.asked.append(nbytes)
        return True

    def read_pages(self, memory: memoryview, offset: int, nbytes: int) -> None:
        """See DirectFile."""
        self.pages += nbytes
        self.read_into(memory[offset % ALIGN :][:nbytes], offset)


@pytest.mark.parametrize("stretch, asks", [(shared_read.CACHE_PROBE_NBYTES, 1), (2 * BLOCK, 4)])
def test_page_cache_is_probed_once_per_range(
    monkeypatch: pytest.MonkeyPatch, stretch: int, asks: int
) -> None:
    monkeypatch.setattr(shared_read, "CHUNK", 2 * BLOCK)
    monkeypatch.setattr(shared_read, "CACHE_PROBE_NBYTES", stretch)
    store = Paged(torch.float32)
    target = torch.zeros(SHAPES["even"])
    read(store, [Wanted("even", whole_box(target.shape), target)])
    assert torch.equal(target, store.values["even"])
    assert store.pages == target.nbytes == 4 * 2 * BLOCK
    # several threads may ask for the same stretch at once
    assert asks <= len(store.asked) <= max(asks, 3) and set(store.asked) == {2 * BLOCK}
