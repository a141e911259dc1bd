"""How long collectives wait for other ranks, in the world and in its groups."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from meshwright_dtensor._torch.groups import new_group
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.mesh import build_mesh, group_over, init
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool, fake_group

pytestmark = pytest.mark.host("the time-outs of gloo")


@contextmanager
def waiting(seconds: float) -> Iterator[None]:
    """Inside, collectives wait so long; the ranks of a pool are used again."""
    world = dist.group.WORLD
    before = world._get_backend(torch.device("cpu")).options._timeout
    init(timeout=seconds)
    try:
        yield
    finally:
        init(timeout=before.total_seconds())


def timeouts(rank: int, size: int) -> list[timedelta]:
    with waiting(7):
        return timeouts_of_groups(size)


def timeouts_of_groups(size: int) -> list[timedelta]:
    mesh = build_mesh(ParallelPlan(world_size=size, degrees={"dp": 2, "tp": 2, "cp": 1}))
    groups = [None, *(mesh.get_group(axis) for axis in ("dp", "tp", "cp")), group_over(mesh, ("dp", "tp"))]
    groups[0] = dist.group.WORLD
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


def late(rank: int, size: int) -> float:
    with waiting(1.5):
        # a group of its own, whose members are the world's
        group = new_group(range(size))
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError, match="imed out"):
            dist.all_reduce(torch.ones(1), group=group)
    return time.monotonic() - start


def test_all_groups_wait_as_long_as_the_world(rank_pool: RankPool) -> None:
    assert rank_pool.run(4, timeouts) == [[timedelta(seconds=7)] * 5] * 4


def test_a_rank_that_waits_too_long_fails(rank_pool: RankPool) -> None:
    waited, _ = rank_pool.run(2, late)
    assert waited >= 1.0


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_a_timeout_that_no_rank_can_keep_is_refused(seconds: float) -> None:
    with pytest.raises(UsageError, match="seconds above 0"):
        init(timeout=seconds)


def test_meshes_over_a_fake_group_need_no_timeout() -> None:
    with fake_group(8, rank=3):
        mesh = build_mesh(ParallelPlan(world_size=8, degrees={"dp": 4, "tp": 2}))
        assert mesh.shape == (4, 2)
