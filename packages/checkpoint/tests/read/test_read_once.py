"""Ranks of one machine read shared bytes once and copy them to the others. An error on one rank is raised on all."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from meshwright_checkpoint import CheckpointError, CorruptError, load, loading, save
from meshwright_checkpoint.io.host_memory import HUGE, collapse_to_large_pages, shared_memory
from meshwright_checkpoint.read import shared_read
from meshwright_checkpoint.read.shared_read import SharedRead
from meshwright_dtensor.testing.rank_pool import RankError, RankPool

SHAPES = {"even": (1024, 2048), "odd": (701, 1003), "long": (3, 700_001), "small": (5, 8)}
NBYTES = sum(4 * a * b for a, b in SHAPES.values())


def values(name: str) -> torch.Tensor:
    rows, columns = SHAPES[name]
    return torch.arange(rows * columns, dtype=torch.int32).view(torch.float32).view(rows, columns)


def model_of(size: int, dim: int | None, fill: bool) -> Any:
    """Tensors sharded on `dim` over all ranks, or whole on each."""
    model = torch.nn.ParameterDict()
    for name in SHAPES:
        value = values(name) if fill else torch.zeros(SHAPES[name])
        if dim is not None:
            mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tp",))
            value = distribute_tensor(value, mesh, [Shard(dim)], src_data_rank=None)
        model[name] = torch.nn.Parameter(value)
    return model


def put(rank: int, size: int, path: str) -> None:
    save(path, model=model_of(size, 0, True), asynchronous=False)


def reads(rank: int, size: int, path: str, dim: int | None, alone: bool) -> int:
    """Bytes of tensors that this rank reads in a load."""
    model = model_of(size, dim, False)
    meet, check, read = loading.connect_node_peers, SharedRead._check, []

    def counted(self: Any, chunk: Any, data: Any) -> None:
        read.append(chunk.nbytes)
        check(self, chunk, data)

    SharedRead._check = counted  # type: ignore[method-assign]
    if alone:
        loading.connect_node_peers = lambda ranks, what, nbytes: None  # type: ignore[assignment]
    try:
        load(path, model=model, random=False)
    finally:
        SharedRead._check, loading.connect_node_peers = check, meet  # type: ignore[method-assign]
    full = model_of(size, dim, True)
    for name, value in model.items():
        want = full[name]
        if dim is not None:
            value, want = value.to_local(), want.to_local()
        assert torch.equal(value.view(torch.int32), want.view(torch.int32)), name
    return sum(read)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "dim"), [(2, 1), (4, None)])
def test_machine_reads_shared_bytes_once(
    size: int, dim: int | None, rank_pool: RankPool, tmp_path: Path
) -> None:
    path = str(tmp_path / "x")
    rank_pool.run(2, put, path)
    counts = rank_pool.run(size, reads, path, dim, False)
    assert sum(counts) == NBYTES
    assert max(counts) < 1.35 * NBYTES / size + (1 << 20)
    assert sum(rank_pool.run(size, reads, path, dim, True)) > 1.7 * NBYTES  # without sharing


def reads_around(rank: int, size: int, path: str, large: bool) -> tuple[int, int]:
    """Bytes of direct reads into shared memory, and into private memory."""
    for file in Path(path).iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    dist.barrier()
    fetch, worth, pages = (
        SharedRead._fetch_direct,
        shared_read.LARGE_PAGES_NBYTES,
        shared_read.collapse_to_large_pages,
    )
    shared, private = [0], [0]

    def counted(self: Any, chunk: Any, file: Any, memory: torch.Tensor) -> torch.Tensor:
        slots = self._memories[self._me]
        inside = slots.data_ptr() <= memory.data_ptr() < slots.data_ptr() + slots.numel()
        (shared if inside else private).append(chunk.nbytes)
        return fetch(self, chunk, file, memory)

    SharedRead._fetch_direct, shared_read.LARGE_PAGES_NBYTES = counted, 0  # type: ignore[method-assign]
    if not large:
        shared_read.collapse_to_large_pages = lambda memory: False
    try:
        reads(rank, size, path, 1, False)
    finally:
        SharedRead._fetch_direct, shared_read.LARGE_PAGES_NBYTES, shared_read.collapse_to_large_pages = (
            fetch,
            worth,
            pages,
        )  # type: ignore[method-assign]
    return sum(shared), sum(private)


@pytest.mark.parametrize("large", [True, False])
def test_direct_reads_go_into_shared_large_pages(large: bool, rank_pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    rank_pool.run(2, put, str(path))
    counts = rank_pool.run(2, reads_around, str(path), large)
    shared, private = (sum(count[side] for count in counts) for side in (0, 1))
    if not shared + private:
        pytest.skip("the file system of temporary files cannot be read around the cache")
    assert shared + private > 0.7 * NBYTES  # smaller reads use the cache
    assert (private if large and large_pages() else shared) == 0


def large_pages() -> bool:
    """Whether this system makes large pages of shared memory (Linux 6.1)."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, HUGE)
    memory = shared_memory(fd, HUGE)
    other = shared_memory(fd, HUGE)
    os.close(fd)
    supported = collapse_to_large_pages(memory)
    memory[:] = 7
    assert bool((other == 7).all())
    assert not collapse_to_large_pages(memory[1:]) and not collapse_to_large_pages(memory[: HUGE - 1])
    return supported


def fails(rank: int, size: int, path: str, how: str) -> str:
    """The error of a load during which one rank fails."""
    model = model_of(size, 1, False)
    preadv = os.preadv

    def failing(fd: int, buffers: Any, offset: int) -> int:
        if offset and rank == 1:
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error")
        return preadv(fd, buffers, offset)

    if how != "damage":
        os.preadv = failing  # cached and direct reads
    try:
        load(path, model=model)
    except CheckpointError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        os.preadv = preadv
    return "loaded"


@pytest.mark.slow
def test_read_error_on_one_rank_raises_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "x"
    rank_pool.run(2, put, str(path))
    messages = rank_pool.run(4, fails, str(path), "error")
    assert all("Input/output error" in text for text in messages)
    assert sum("rank 1 failed" in text for text in messages) == 3
    data = path / "data-00001.safetensors"
    with open(data, "r+b") as file:
        file.seek(data.stat().st_size - 1)
        file.write(b"\x7f")
    messages = rank_pool.run(2, fails, str(path), "damage")
    assert all(
        re.search("the stored values of model/(odd|long|small) are damaged", text) for text in messages
    ), messages
    assert [text.split(":")[0] for text in messages] == [CorruptError.__name__] * 2


class Counter(torch.nn.Module):
    """Extra state that cannot be taken on one rank."""

    def __init__(self, fails: bool) -> None:
        super().__init__()
        self.weight, self.fails = torch.nn.Parameter(torch.ones(2)), fails

    def get_extra_state(self) -> int:
        if self.fails:
            raise OSError("the counter is gone")
        return 3

    def set_extra_state(self, state: int) -> None:
        pass


def loads_counter(rank: int, size: int, path: str) -> str:
    save(path, model=Counter(False), asynchronous=False)
    try:
        load(path, model=Counter(rank == 1))
    except (OSError, CheckpointError) as error:
        return str(error)
    return "loaded"


def test_state_dict_that_fails_on_one_rank_fails_the_load_on_all(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(2, loads_counter, str(tmp_path / "x"), timeout=60)
    assert "rank 1 failed" in first and "the counter is gone" in first + second


@pytest.mark.slow
def test_killed_rank_ends_the_load(tmp_path: Path) -> None:
    with RankPool(grace=20.0) as pool:
        pool.run(2, put, str(tmp_path / "x"))
        with pytest.raises(RankError, match="SIGKILL"):
            pool.run(2, fails, str(tmp_path / "x"), "die", timeout=30)
