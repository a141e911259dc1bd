"""What running modules again costs: where the time goes, what is kept, policy by policy."""

from __future__ import annotations

import pytest
from planner_models import LAPTOP_CPU, Transformer, eager, tokens

from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan, StageTime
from meshwright_dtensor.planning import PlanRequest
from meshwright_planner.search.setting import allowing

CLUSTER = LAPTOP_CPU


def planned(recompute: str | None, limit: int | None = None) -> ParallelPlan:
    model, batch = Transformer(layers=4, hidden=128), tokens(rows=16)
    request = PlanRequest(cluster=CLUSTER, world_size=1, recompute=recompute, memory_limit=limit)
    return eager().plan(model, batch, request)[0]


def time(plan: ParallelPlan) -> StageTime:
    assert plan.predicted is not None and plan.predicted.split is not None
    (stage,) = plan.predicted.split.stages
    assert stage.forward_seconds + stage.backward_seconds == pytest.approx(plan.predicted.compute_seconds)
    return stage


def test_what_runs_again_is_time_of_the_backward_pass() -> None:
    free, again = time(planned(None)), time(planned("full"))
    assert free.backward_seconds == pytest.approx(2 * free.forward_seconds)
    assert again.forward_seconds == pytest.approx(free.forward_seconds)
    assert 2.8 * again.forward_seconds < again.backward_seconds <= 3 * again.forward_seconds


def test_policies_trade_time_for_memory() -> None:
    """Each keeps less than the one before, and takes longer; the first that fits is taken."""
    plans = [planned(policy) for policy in (None, "selective", "alternate", "full")]
    found = [plan.predicted for plan in plans]
    seconds = [p.compute_seconds for p in found if p is not None]
    held = [p.total_bytes for p in found if p is not None]
    assert seconds == sorted(set(seconds)) and held == sorted(set(held), reverse=True)
    for plan, size in zip(plans, held, strict=True):
        assert planned(None, allowing(size)).recompute == plan.recompute
    with pytest.raises(InfeasibleError):
        planned(None, held[-1] // 2)
