"""The gap that a plan names holds with everything installed: no configuration of a small world, evaluated one by one, beats it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import EagerPlanner, default_rules
from meshwright_planner.search.lower_bound import Floor


def every(search: Search) -> Iterator[Candidate]:
    """All configurations that no strategy refuses, each evaluated exactly."""
    for degrees in search.combinations():
        shared = search.setting.stage or (2, 3)
        stages = (shared if isinstance(shared, tuple) else (shared,)) if degrees.get(SHARED, 1) > 1 else (0,)
        for way in search.ways(degrees, thorough=True) or [{}]:
            for policy in (None, *search.can_recompute(degrees)):
                for stage in stages:
                    try:
                        yield search.evaluate(Point.of(degrees, stage, way, policy))
                    except PlanError:
                        continue


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "pins"),
    [
        ("llama", {"world_size": 2}),
        ("gpt2", {"world_size": 4, "pp": 2, "cp": 1, "degrees": {"vp": 1}}),
        ("mixtral", {"world_size": 2, "cp": 1}),
    ],
    ids=["everything", "pipeline", "experts"],
)
@pytest.mark.parametrize("cluster", ["laptop-cpu", "dgx-h100"])
def test_no_configuration_beats_the_gap(case: str, pins: dict[str, Any], cluster: str) -> None:
    torch.manual_seed(0)
    model, batch = CASES[case].model(), CASES[case].batch()
    plans = mw.plan(model, batch, cluster=cluster, top_k=2, **pins)
    assert isinstance(plans, list)
    request = PlanRequest(cluster=cluster, **pins)
    search = Search(EagerPlanner().setting(model, batch, request, discover()), default_rules())
    evaluated = list(every(search))
    assert len(evaluated) > 10
    for place, plan in enumerate(plans):
        assert (
            isinstance(plan, ParallelPlan) and plan.predicted is not None and plan.predicted.gap is not None
        )
        least = plan.predicted.step_seconds * (1 - plan.predicted.gap)
        assert sum(c.step_seconds < least * (1 - 1e-4) for c in evaluated if not c.excess_bytes) <= place
    floor = Floor(search.basis, search.setting.cluster, evaluated[0], None)
    for candidate in evaluated:
        stages = dict(candidate.point.degrees).get("pp", 1)
        assert floor.seconds(stages) <= candidate.step_seconds, candidate.name


@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["laptop-cpu", "dgx-h100"])
def test_exact_is_said_of_every_number_of_microbatches(cluster: str) -> None:
    """By default the search tries 2, 4 and 12 microbatches of 12 rows. The proof tries all, and its best becomes the plan."""
    torch.manual_seed(0)
    model, batch = (
        CASES["gpt2"].model(),
        {name: x[:1].repeat(12, 1) for name, x in CASES["gpt2"].batch().items()},
    )
    pins: dict[str, Any] = {"cluster": cluster, "world_size": 2, "pp": 2}
    plan = mw.plan(model, batch, **pins)
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None and plan.pipeline is not None
    assert plan.predicted.gap == 0.0 and str(plan.predicted.proof).startswith("exact")
    pinned = [mw.plan(model, batch, microbatches=count, **pins) for count in (1, 2, 3, 4, 6, 12)]
    assert plan.predicted.step_seconds == min(p.predicted.step_seconds for p in pinned)  # type: ignore[union-attr]


def test_a_degree_that_only_a_pin_opens_is_named() -> None:
    model = CASES["llama"].model()
    batch = {name: x[:1] for name, x in CASES["llama"].batch().items()}
    with pytest.raises(
        UsageError, match=r"pin a degree that is tried only when pinned \(cp=2, .*\), or change"
    ):
        mw.plan(model, batch, cluster="laptop-cpu", world_size=2, tp=1, degrees={"vp": 1})
    assert mw.plan(model, batch, cluster="laptop-cpu", world_size=2, tp=1, cp=2, degrees={"vp": 1})
    two = mw.plan(model, batch, cluster="laptop-cpu", world_size=2, degrees={"vp": 1})
    assert isinstance(two, ParallelPlan) and two.predicted is not None
    assert "tried only when pinned are not covered (cp=2, " in str(two.predicted.proof)


def test_a_world_that_is_climbed_has_a_bound() -> None:
    (plan,) = [mw.plan(CASES["llama"].model(), CASES["llama"].batch(), cluster="dgx-h100", world_size=64)]
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    assert plan.predicted.gap is not None and 0 < plan.predicted.gap < 1
    assert plan.predicted.proof is not None and plan.predicted.proof.startswith("bounded")
