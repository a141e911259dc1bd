"""Other kinds of models: planned with nothing pinned, applied, verified against one device; and planned for clusters."""

from __future__ import annotations

import math

import pytest
import torch
from kinds import KINDS

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify

ROWS = 8


def planned(name: str, **options: object) -> ParallelPlan:
    """The best plan of the small form; its values are never made."""
    with mw.deferred_init():
        model = KINDS[name].small()
    plan = mw.plan(model, KINDS[name].batch(ROWS, False), cluster="laptop-cpu", **options)  # type: ignore[arg-type]
    assert isinstance(plan, ParallelPlan)
    return plan


def check(rank: int, size: int, name: str, text: str) -> list[str]:
    """Two steps under a plan against one device: what differs."""
    kind = KINDS[name]
    report = verify(kind.small, kind.batch(ROWS, False), ParallelPlan.from_json(text), steps=2)
    return [f"{f.kind} {f.name} {f.relative:.1e} {f.note}" for f in report.failures]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_planned_applied_and_that_of_one_device(rank_pool: RankPool, name: str) -> None:
    plan = planned(name, world_size=4)
    assert plan.world_size == 4 and any(degree > 1 for degree in plan.degrees.values())
    for wrong in rank_pool.run(4, check, name, plan.to_json()):
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_is_that_of_one_device_on_a_searched_axis(rank_pool: RankPool, name: str) -> None:
    plan = planned(name, world_size=2, tp=2)
    for wrong in rank_pool.run(2, check, name, plan.to_json()):
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_a_kind_of_real_size_is_planned_for_a_cluster(name: str) -> None:
    kind, ranks = KINDS[name], 64
    with torch.device("meta"):
        model = kind.large()
    batch = {key: value.to("meta") for key, value in kind.batch(4, True).items()}
    plan = mw.plan(model, batch, cluster="dgx-h100", world_size=ranks, global_batch_size=16 * ranks)
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    assert math.prod(plan.degrees.values()) == ranks
    alone = mw.plan(model, batch, cluster="dgx-h100", world_size=1, global_batch_size=16, memory_limit=10**15)
    assert isinstance(alone, ParallelPlan) and alone.predicted is not None
    # 64 times the rows on 64 ranks: the work is divided, whatever is communicated for it
    assert plan.predicted.compute_seconds < 2 * alone.predicted.compute_seconds


@pytest.mark.slow
def test_tables_that_do_not_fit_are_divided(rank_pool: RankPool) -> None:
    """Where memory asks for it, the large table is sharded, and training equals one device."""
    size, free = 2048 * 16 * 4, planned("recommender", world_size=4)
    plan = planned(
        "recommender", world_size=4, memory_limit=3 * size
    )  # whole, with Adam's state, it needs four times
    assert free.predicted is not None and plan.predicted is not None
    assert free.predicted.total_bytes > 4 * size > 3 * size >= plan.predicted.total_bytes
    cut = {axis for axis, s in plan.parameter_states("tables.2.weight").items() if isinstance(s, int)}
    assert cut or plan.zero is not None
    for wrong in rank_pool.run(4, check, "recommender", plan.to_json()):
        assert not wrong


@pytest.mark.slow
def test_tables_that_no_device_holds_are_divided() -> None:
    """64 million rows of 128, with their state, are four times what a device has."""
    with torch.device("meta"):
        model = KINDS["recommender"].large()
    batch = {key: value.to("meta") for key, value in KINDS["recommender"].batch(4, True).items()}
    plan = mw.plan(model, batch, cluster="dgx-a100-40gb", world_size=16, global_batch_size=4096)
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    assert plan.predicted.total_bytes < 40e9
    assert all(isinstance(plan.parameter_states(f"tables.{n}.weight").get("tp"), int) for n in (0, 1))
