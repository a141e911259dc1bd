"""The rank pool: results, errors, hangs and deaths of real processes; and the fake group."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import (
    JOIN_ATTEMPTS,
    RankError,
    RankPool,
    fake_group,
)

pytestmark = pytest.mark.host("processes, pipes and rendezvous")


@dataclass
class Here:
    """A class of a test module, to see that it travels."""

    rank: int


def total(rank: int, world_size: int, value: torch.Tensor) -> torch.Tensor:
    value = value + rank
    dist.all_reduce(value)
    return value


def process_and_world(rank: int, world_size: int) -> tuple[int, int, int]:
    return os.getpid(), dist.get_world_size(), dist.get_rank()


def draw(rank: int, world_size: int) -> torch.Tensor:
    return torch.rand(3)


def here(rank: int, world_size: int, given: Here) -> Here:
    assert isinstance(given, Here)
    return Here(rank)


MANY: list[Here] = []
HELD: WeakSet[Any] = WeakSet()


class Cycle:
    """An object that only a garbage collection frees."""

    def __init__(self) -> None:
        self.itself = self


def fails_with_a_cycle(rank: int, world_size: int) -> None:
    # so many that what is left is taken out of garbage collections
    MANY.extend(Here(number) for number in range(30_000))
    held = Cycle()
    HELD.add(held)
    raise ValueError("held")


def still_held(rank: int, world_size: int) -> int:
    MANY.clear()
    gc.collect()
    return len(HELD)


def leaves_a_mark(rank: int, world_size: int, folder: str) -> int:
    (Path(folder) / str(rank)).touch(exist_ok=False)
    return rank


def one_fails(rank: int, world_size: int, failing: int) -> None:
    if rank == failing:
        raise UsageError("rank three said no")
    dist.all_reduce(torch.ones(1))


class Unpicklable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("does not survive pickle")


def fails_oddly(rank: int, world_size: int) -> None:
    raise Unpicklable(1, 2)


def one_sleeps(rank: int, world_size: int) -> None:
    if rank == 1:
        time.sleep(100)


def one_dies(rank: int, world_size: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(1))


def one_leaves(rank: int, world_size: int) -> None:
    if rank == 0:
        os._exit(3)


def exits_badly(rank: int, world_size: int) -> None:
    atexit.register(os._exit, 7)


@pytest.mark.slow
def test_results_come_in_rank_order(rank_pool: RankPool) -> None:
    start = torch.tensor([1.0, 2.0])
    for size in (1, 4, 2):
        results = rank_pool.run(size, total, start)
        want = start * size + sum(range(size))
        assert len(results) == size
        assert all(torch.equal(result, want) for result in results)


@pytest.mark.slow
def test_processes_are_reused_and_the_default_group_is_the_world(rank_pool: RankPool) -> None:
    first = rank_pool.run(3, process_and_world)
    again = rank_pool.run(2, process_and_world)
    assert [pid for pid, _, _ in first][:2] == [pid for pid, _, _ in again]
    assert [row[1:] for row in again] == [(2, 0), (2, 1)]
    assert os.getpid() not in [pid for pid, _, _ in first]


def test_every_call_starts_from_the_same_seed(rank_pool: RankPool) -> None:
    first, other = rank_pool.run(2, draw)
    (later, _) = rank_pool.run(2, draw)
    torch.manual_seed(0)
    assert torch.equal(first, torch.rand(3))
    assert torch.equal(first, other)
    assert torch.equal(first, later)


def test_classes_of_the_test_module_are_sent_to_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, here, Here(7)) == [Here(0), Here(1)]


@pytest.mark.slow
def test_the_exception_of_the_rank_that_failed_first_is_raised_with_its_traceback(
    rank_pool: RankPool,
) -> None:
    with pytest.raises(UsageError, match="rank three said no") as caught:
        rank_pool.run(4, one_fails, 3)
    assert isinstance(caught.value.__cause__, RankError)
    assert "rank 3 of 4 failed in one_fails" in str(caught.value.__cause__)
    assert "in one_fails" in str(caught.value.__cause__)
    assert rank_pool.run(4, one_fails, 9) == [None] * 4


def test_what_a_failed_function_held_is_freed(rank_pool: RankPool) -> None:
    with pytest.raises(ValueError, match="held"):
        rank_pool.run(1, fails_with_a_cycle)
    assert rank_pool.run(1, still_held) == [0]


def test_exception_that_cannot_be_pickled_is_reported_as_text(rank_pool: RankPool) -> None:
    with pytest.raises(RankError, match="Unpicklable: does not survive pickle"):
        rank_pool.run(1, fails_oddly)


def test_a_local_function_is_refused(rank_pool: RankPool) -> None:
    with pytest.raises(UsageError, match="top-level"):
        rank_pool.run(1, lambda rank, world_size: None)


@pytest.mark.parametrize("size", [0, 9])
def test_a_world_outside_the_pool_is_refused(rank_pool: RankPool, size: int) -> None:
    with pytest.raises(UsageError, match=f"world_size={size} is outside"):
        rank_pool.run(size, draw)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [1, JOIN_ATTEMPTS])
def test_world_that_fails_to_join_is_created_again(broken: int, tmp_path: Path) -> None:
    with RankPool(grace=5.0) as pool:
        for attempt in range(broken):  # a folder where the file is due
            (pool._folder / f"meet-{attempt + 1}").mkdir()
        if broken < JOIN_ATTEMPTS:
            assert pool.run(2, leaves_a_mark, str(tmp_path)) == [0, 1]
        else:
            with pytest.raises(Exception, match="Is a directory") as caught:
                pool.run(2, leaves_a_mark, str(tmp_path))
            assert f"joining the others, {JOIN_ATTEMPTS} times" in str(caught.value.__cause__)
            assert pool.run(2, leaves_a_mark, str(tmp_path)) == [0, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]  # it has run once on each


@pytest.mark.slow
def test_hangs_and_deaths_are_errors_and_the_pool_recovers() -> None:
    with RankPool(grace=2.0) as pool:
        assert len(pool.run(2, draw)) == 2
        with pytest.raises(
            RankError, match=r"rank 1 of 2 did not finish one_sleeps within 1 s(.|\n)*in one_sleeps"
        ):
            pool.run(2, one_sleeps, timeout=1.0)
        with pytest.raises(RankError, match=r"rank 1 .killed by SIGKILL. of 2 died in one_dies"):
            pool.run(2, one_dies)
        with pytest.raises(RankError, match=r"rank 0 .exit code 3. of 2 died in one_leaves"):
            pool.run(2, one_leaves)
        assert len(pool.run(2, draw)) == 2


@pytest.mark.slow
def test_ranks_exit_without_interpreter_shutdown() -> None:
    with RankPool() as pool:
        pool.run(2, exits_badly)
        processes = [rank.process for rank in pool._ranks]
    assert all(process.exitcode in (0, -signal.SIGKILL) for process in processes)  # killed where too slow


def make_groups(rank: int, world_size: int) -> int:
    """Threads of this process once there are a few more groups: in a cycle as models are, and in DTensor's caches."""
    cycle: list[Any] = [dist.new_group() for _ in range(2)]
    cycle.append(cycle)
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",))
    distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]).redistribute(placements=[Replicate()])
    return len(os.listdir("/proc/self/task"))


def fails_to_join(rank: int, world_size: int, path: str) -> None:
    if rank == 0:
        dist.destroy_process_group()
        store = FileStore(path, world_size)
        dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=0.2))


@pytest.mark.slow
def test_a_rank_that_could_not_join_finds_its_peers_next_time(rank_pool: RankPool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError):
        rank_pool.run(2, fails_to_join, str(tmp_path / "alone"))
    assert len(rank_pool.run(2, draw, timeout=30.0)) == 2


def parent_and_environment(rank: int, world_size: int, name: str) -> tuple[int, str | None]:
    return os.getppid(), os.environ.get(name)


@pytest.mark.slow
def test_ranks_are_forked_and_have_the_environment_of_their_pool(
    rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rank_pool.run(3, parent_and_environment, "SET_LATER")
    (first, *others), mine = [parent for parent, _ in before], os.getpid()
    assert first == mine and mine not in others and len(set(others)) == 1
    monkeypatch.setenv("SET_LATER", "yes")  # the server that ranks are forked from runs already
    with RankPool() as pool:
        after = pool.run(2, parent_and_environment, "SET_LATER")
    assert [value for _, value in before] == [None] * 3 and [value for _, value in after] == ["yes"] * 2
    assert after[1][0] == others[0]


FORKED_WITH = """
import sys
from meshwright_dtensor.testing.rank_pool import RankPool

def loaded(rank, world_size):
    return "zipapp" in sys.modules

if __name__ == "__main__":
    with RankPool(preload=["zipapp"]) as pool, RankPool() as later:
        print(pool.run(2, loaded), later.run(2, loaded))
"""


@pytest.mark.slow
def test_ranks_are_forked_with_preloaded_modules(tmp_path: Path) -> None:
    script = tmp_path / "forked.py"  # in a process of its own: that of the tests has its server
    script.write_text(FORKED_WITH)
    output = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True).stdout
    assert output.split("\n")[0] == "[False, True] [False, True]"


@pytest.mark.slow
def test_groups_of_earlier_runs_end() -> None:
    with RankPool() as pool:
        threads = [pool.run(2, make_groups)[0] for _ in range(12)]
    # each run makes more
    assert max(threads) <= threads[0] + 4


def test_the_fake_group_is_a_world_without_processes() -> None:
    with fake_group(8, rank=5):
        assert (dist.get_world_size(), dist.get_rank()) == (8, 5)
        dist.all_reduce(torch.ones(2))
        with pytest.raises(UsageError, match="of 8 ranks exists"), fake_group(2):
            pass
    assert not dist.is_initialized()
    with pytest.raises(UsageError, match="rank=2"), fake_group(2, rank=2):
        pass
