"""The cores of a process and its freed memory; the exit of one that used gloo: its threads release their tensors before."""

from __future__ import annotations

import atexit
import ctypes
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group
from meshwright_dtensor.utils import process

pytestmark = pytest.mark.host("how a process ends")

LINUX = pytest.mark.skipif(not process.THREADS.is_dir(), reason="elsewhere `settle` is a pause")


def holders(rank: int, world_size: int) -> tuple[int, int]:
    """How many threads hold the tensor of a finished collective, before and after `settle`.

    This thread keeps the GIL in between, as one that goes straight on to its end may.
    """
    value = torch.ones(1)
    first = ctypes.c_float.from_address(value.data_ptr())
    interval, references = sys.getswitchinterval(), sys.getrefcount(value)
    dist.barrier()
    if rank == 1:
        time.sleep(0.2)  # so that the collective ends while rank 0 keeps the GIL
    sys.setswitchinterval(1000.0)
    try:
        dist.all_reduce(value, async_op=True)
        end = time.monotonic() + 30.0
        while first.value != world_size and time.monotonic() < end:
            pass
        end = time.monotonic() + 0.1
        while time.monotonic() < end:
            pass
        before = sys.getrefcount(value) - references
        process.settle()
        return before, sys.getrefcount(value) - references
    finally:
        sys.setswitchinterval(interval)


def waits_for_its_peer(rank: int, world_size: int, settled: str) -> tuple[float, bool]:
    """Seconds that `settle` took inside a collective that its peer joins only then, and whether it had ended."""
    value = torch.ones(1)
    if rank == 1:
        while not Path(settled).exists():
            time.sleep(0.01)
        dist.all_reduce(value)
        return 0.0, True
    work = dist.all_reduce(value, async_op=True)
    assert work is not None
    start = time.monotonic()
    process.settle(timeout=30.0)
    outcome = time.monotonic() - start, work.is_completed()
    Path(settled).touch()
    work.wait()
    return outcome


@LINUX
def test_gloo_releases_the_tensors_of_a_finished_collective(rank_pool: RankPool) -> None:
    before, after = rank_pool.run(2, holders)[0]
    assert before == 1  # else this shows nothing
    assert after == 0


@LINUX
def test_a_collective_that_a_peer_does_not_join_is_not_waited_for(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    seconds, ended = rank_pool.run(2, waits_for_its_peer, str(tmp_path / "settled"))[0]
    assert seconds < 15.0
    assert not ended


def test_every_entry_point_registers_settle(monkeypatch: pytest.MonkeyPatch) -> None:
    registered: list[object] = []
    with monkeypatch.context() as patch, fake_group(2):
        patch.setattr(atexit, "register", registered.append)
        process.settle_at_exit.cache_clear()
        init("cpu")
        init("cpu")
    process.settle_at_exit.cache_clear()
    assert registered == [process.settle]


def freed(rank: int, world_size: int) -> tuple[int, int]:
    """Resident bytes of 64 MiB that were freed between pieces in use, before and after they are returned."""

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    process.return_freed_memory()
    before = resident()
    pieces = [torch.ones(2**14) for _ in range(1024)]
    # what is freed last in memory goes back by itself
    in_use = [*pieces[::64], pieces[-1]]
    pieces.clear()
    kept = resident() - before
    process.return_freed_memory()
    assert all(piece.sum() == 2**14 for piece in in_use)
    return kept, resident() - before


@LINUX
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="other C libraries keep nothing")
def test_freed_memory_goes_back_to_the_system(rank_pool: RankPool) -> None:
    kept, left = rank_pool.run(1, freed)[0]
    assert kept > 2**25  # else this shows nothing
    assert left < 2**24


def test_usable_cores_respect_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 8}, raising=False)
    assert process.usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as off Linux
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert process.usable_cores() == 12
