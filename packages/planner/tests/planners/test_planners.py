"""Alpa's and FlexFlow's searches next to the default one: their own formulas, the same costs, one table."""

from __future__ import annotations

import json
import math
import random
import re
from typing import Any

import pytest
from planner_models import DGX_H100, HOST, LAPTOP_CPU, Transformer, tokens

from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.hints import mark_sharding
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.planners.alpa import AlpaPlanner, latency
from meshwright_planner.planners.eager import EagerPlanner
from meshwright_planner.planners.mcmc import BETA, McmcPlanner, _accepted
from meshwright_planner.reports.compare_planners import compare


class Eager(EagerPlanner):
    def __init__(self) -> None:
        super().__init__(HOST)


class Alpa(AlpaPlanner):
    def __init__(self) -> None:
        super().__init__(HOST)


class Mcmc(McmcPlanner):
    def __init__(self) -> None:
        super().__init__(HOST, proposals=200)


PLANNERS = PluginHost(
    {
        PlannerSpec: {
            name: Registered(
                PlannerSpec(name=name, target=f"{__name__}:{made.__name__}"), "tests", "0", "tests"
            )
            for name, made in (("eager", Eager), ("alpa", Alpa), ("mcmc", Mcmc))
        }
    }
)


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(layers=2, hidden=128, vocab=1024)


def request(**options: Any) -> PlanRequest:
    return PlanRequest(**{"cluster": DGX_H100, "world_size": 8, **options})


def step(plan: ParallelPlan | None) -> float:
    assert plan is not None and plan.predicted is not None
    return plan.predicted.step_seconds


@pytest.mark.parametrize("cluster", [DGX_H100, LAPTOP_CPU], ids=lambda c: c.name)
def test_default_planner_is_at_least_as_good(model: Transformer, cluster: Any) -> None:
    batch = tokens(rows=8, vocab=1024)
    comparison = compare(model, batch, request(cluster=cluster), ("mcmc", "alpa", "eager"), PLANNERS)
    by_name = {answer.planner: answer for answer in comparison.answers}
    assert step(by_name["eager"].plan) <= min(map(step, comparison.plans)) * (1 + 1e-9)
    assert [step(p) for p in comparison.plans] == sorted(step(p) for p in comparison.plans)
    text, data = str(comparison), json.loads(json.dumps(comparison.to_dict()))
    assert all(f"{entry['planner']} answered in" in text for entry in data["planners"])
    assert {p.provenance.planner for p in comparison.plans} == {"eager", "alpa", "mcmc"}


@pytest.mark.parametrize("planner", [Alpa, Mcmc])
def test_equal_requests_give_equal_plans(model: Transformer, planner: type[EagerPlanner]) -> None:
    first, second = (planner().plan(model, tokens(rows=8, vocab=1024), request(top_k=2)) for _ in range(2))
    assert first == second and len(first) == 2


@pytest.mark.slow
@pytest.mark.parametrize("planner", [Alpa, Mcmc])
def test_pins_and_marks_hold_for_other_planners(planner: type[EagerPlanner]) -> None:
    model = Transformer(layers=2)
    batch = tokens(rows=8)
    assert planner().plan(model, batch, request(tp=4))[0].degrees == {"dp": 2, "tp": 4}
    from torch.distributed.tensor import Shard

    mark_sharding(model.head.weight, {"tp": Shard(1)})
    assert planner().plan(model, batch, request(tp=4))[0].parameter_states("head.weight")["tp"] == 1
    free = planner().plan(model, batch, request(tp=4, keep_user_sharding=False))[0]
    assert free.parameter_states("head.weight").get("tp") != 1
    with pytest.raises(InfeasibleError, match="no plan"):
        planner().plan(model, batch, request(memory_limit=2**10))


def test_alpa_latency_is_equation_2() -> None:
    """sum of t_i + (B - 1) max t_i, for stages of 1, 3 and 2 parts of the compute and 3, 1 and 2 of the collectives, B = 4."""
    from types import SimpleNamespace

    compute, sent, count = 6.0, 3.0, 4
    parts, shares = (1 / 6, 3 / 6, 2 / 6), (3 / 6, 1 / 6, 2 / 6)
    candidate: Any = SimpleNamespace(
        point=SimpleNamespace(microbatches=count),
        placement=SimpleNamespace(compute_seconds=compute * count),
        inside={"tp": sent},
        exposed={"tp": 0.5 * count, "dp": 0.25},
        searched=("tp",),
        compute_seconds=3.0 * count,
        stages=[(p / 3, 2 * p / 3) for p in parts],
        stage_communication=[(s / 2, s / 2) for s in shares],
        exposed_seconds=0.5 * count + 0.25,
        between=0.0,
        between_communication=0.0,
    )
    stages = [compute * p + sent * s for p, s in zip(parts, shares)]
    assert stages == [2.5, 3.5, 3.0]
    assert latency(candidate) == pytest.approx(sum(stages) + (count - 1) * max(stages) + 0.25)
    # a strategy that does not say where: as the compute
    candidate.stage_communication = ()
    assert latency(candidate) == pytest.approx(compute + sent + (count - 1) * 3.5 + 0.25)


def test_alpa_lists_its_choice_first_and_the_others_by_time() -> None:
    """Alpa's measure leaves out the optimizer, so its choice need not be the plan with the fastest prediction."""
    large = Transformer(layers=1, hidden=1024, vocab=16384)
    plans = Alpa().plan(large, tokens(rows=8), request(top_k=5))
    chosen, *others = map(step, plans)
    assert others == sorted(others) and others[0] < chosen
    notes = [note for note in plans[0].provenance.notes if note.startswith("chosen before ")]
    assert [note.rpartition("which is predicted ")[2] for note in notes] == [
        f"{100 * (1 - others[0] / chosen):.1f}% faster"
    ]


def test_metropolis_acceptance() -> None:
    """Better is always taken; worse as often as the formula says, and never into what does not fit by much."""
    generator = random.Random(1)
    assert _accepted((0.0, 2.0), (0.0, 1.0), generator)
    assert not _accepted((0.0, 1.0), (5.0, 0.1), generator) and not _accepted(
        (0.0, 1.0), (math.inf, 1.0), generator
    )
    tries = 4000
    taken = sum(_accepted((0.0, 1.0), (0.0, 1.0 + 1 / BETA), generator) for _ in range(tries))
    assert taken / tries == pytest.approx(math.exp(-1), abs=0.03)


@pytest.mark.parametrize("planner", [Alpa, Mcmc, Eager])
def test_time_budget_ends_the_search(model: Transformer, planner: type[EagerPlanner]) -> None:
    batch = tokens(rows=8, vocab=1024)
    notes = [
        " ".join(planner().plan(model, batch, request(time_budget=budget))[0].provenance.notes)
        for budget in (None, 1e-6, 1e6)
    ]
    counts = [re.findall(r"(\d+) (?:configurations|stage counts)", text) for text in notes]
    assert counts[0] == counts[2] and int(counts[1][0]) < int(counts[0][0])
    assert "; the time budget of 1e-06 s ended the search" in notes[1]
    assert "budget" not in notes[0] and "budget" not in notes[2]
    assert not any("the only combination" in text for text in notes)  # one was tried, and there are others
    (pinned,) = planner().plan(model, batch, request(dp=1, tp=8, time_budget=1e-6))
    assert "the only combination of degrees that the request allows" in pinned.provenance.notes
    with pytest.raises(UsageError, match=r"time_budget=0 .*greater than 0"):
        planner().plan(model, batch, request(time_budget=0))
