"""Plans that the search finds by itself, with nothing pinned: each is carried out as it is, and is one device's training."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_planner_models import build, example
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify
from meshwright_planner.clusters.file import write
from meshwright_planner.clusters.registry import named
from meshwright_planner.evaluation.context import allowing


def kinds(plans: list[ParallelPlan]) -> list[ParallelPlan]:
    """The best plan of each kind: which axes it has, its schedule, and whether it recomputes."""
    by_kind: dict[Any, ParallelPlan] = {}
    for plan in plans:
        axes = tuple(axis for axis, degree in plan.degrees.items() if degree > 1)
        schedule = None if plan.pipeline is None else plan.pipeline.schedule
        by_kind.setdefault((axes, schedule, bool(plan.recompute)), plan)
    return list(by_kind.values())


def check(rank: int, size: int, model: str, jsons: list[str]) -> list[str]:
    """A step under each plan against one device: what differs."""
    case, wrong = CASES[model], []
    for text in jsons:
        plan = ParallelPlan.from_json(text)
        report = verify(case.model, case.batch(), plan, steps=1)
        wrong += [f"{mw_name(plan)}: {f.kind} {f.name} {f.difference}" for f in report.failures]
    return wrong


def mw_name(plan: ParallelPlan) -> str:
    """Its degrees and schedule."""
    return f"{dict(plan.degrees)} {None if plan.pipeline is None else plan.pipeline.schedule}"


def searched(model: str, size: int, **options: Any) -> list[ParallelPlan]:
    """The best plans that the search finds."""
    case = CASES[model]
    torch.manual_seed(0)
    plans = mw.plan(case.model(), case.batch(), world_size=size, cluster="laptop-cpu", top_k=24, **options)
    assert isinstance(plans, list)
    return plans


@pytest.mark.slow
def test_every_kind_of_plan_that_is_found_runs(rank_pool: RankPool) -> None:
    chosen = kinds(searched("llama", 4))
    axes = {axis for plan in chosen for axis, degree in plan.degrees.items() if degree > 1}
    assert {"pp", "dp", "tp", "zero"} <= axes and any(plan.pipeline is not None for plan in chosen)
    for wrong in rank_pool.run(4, check, "llama", [plan.to_json() for plan in chosen]):
        assert not wrong


@pytest.mark.slow
def test_memory_decides_for_recomputation(rank_pool: RankPool) -> None:
    free = searched("llama", 2, pp=1)
    assert not any(plan.recompute for plan in free)
    small = min(plan.predicted.total_bytes for plan in free if plan.predicted is not None)
    limit = int(0.85 * small)
    tight = searched("llama", 2, pp=1, memory_limit=limit)
    assert all(plan.predicted is not None and plan.predicted.total_bytes <= limit for plan in tight)
    assert tight[0].recompute
    for wrong in rank_pool.run(2, check, "llama", [tight[0].to_json()]):
        assert not wrong


@pytest.mark.slow
def test_what_draws_is_recomputed_in_a_pipeline_too(rank_pool: RankPool) -> None:
    """GPT-2 with dropout: the second run draws what the first has drawn."""
    plan = searched("gpt2", 2, pp=2, recompute="full")[0]
    assert plan.recompute and plan.pipeline is not None
    for wrong in rank_pool.run(2, check, "gpt2", [plan.to_json()]):
        assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"world_size": 1}, {"world_size": 2, "pp": 1}])
def test_what_would_fit_is_found_where_pipelines_were_out_of_the_question(options: dict[str, int]) -> None:
    needed = mw.plan(build("llama"), example(), cluster="laptop-cpu", **options).predicted.total_bytes
    with pytest.raises(InfeasibleError, match=r"Would fit:\n(.*\n)*  - world_size="):
        mw.plan(build("llama"), example(), cluster="laptop-cpu", memory_limit=needed // 3, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pinned", "fits", "others"),
    [
        ("schedule", "gpipe", "1f1b", {"pp": 2, "microbatches": 8}),
        ("microbatches", 1, 4, {"pp": 2, "schedule": "1f1b"}),
        ("zero", 1, 3, {"dp": 2}),
    ],
)
def test_what_would_fit_without_an_option_is_found(
    name: str, pinned: object, fits: object, others: dict[str, Any]
) -> None:
    batch = {key: x[:1].repeat(8, 1) for key, x in example().items()}
    pins: dict[str, Any] = {"cluster": "laptop-cpu", "world_size": 2, "recompute": "selective", **others}
    enough = mw.plan(build("llama"), batch, **pins, **{name: fits}).predicted.total_bytes
    with pytest.raises(InfeasibleError, match=rf"Would fit:\n(.*\n)*  - without {name}='?{pinned}"):
        mw.plan(build("llama"), batch, memory_limit=allowing(enough), **pins, **{name: pinned})


@pytest.mark.slow
def test_where_ranks_share_cores_no_pinned_plan_is_faster(tmp_path: Path) -> None:
    """Half of the ranks may wait: two stages of two replicas with one microbatch leave a core to each that computes."""
    cluster = replace(named("laptop-cpu"), crowding=((1, 1.0), (2, 1.05), (4, 2.2)))
    write(replace(cluster, cores=2), tmp_path / "crowded.json")
    write(cluster, tmp_path / "own.json")
    case = CASES["llama"]

    def plan_of(file: str = "crowded", **pins: Any) -> ParallelPlan:
        with torch.device("meta"):
            model = case.model()
        plans = mw.plan(model, case.batch(), world_size=4, cluster=str(tmp_path / f"{file}.json"), **pins)
        assert isinstance(plans, ParallelPlan)
        return plans

    def seconds(**pins: Any) -> float:
        predicted = plan_of(**pins).predicted
        assert predicted is not None
        return predicted.step_seconds

    waiting: dict[str, Any] = {"pp": 2, "dp": 2, "microbatches": 1, "planner": "manual", "schedule": "1f1b"}
    assert seconds(**waiting) < 0.9 * seconds(file="own", **waiting)
    best, fixed = seconds(), {"planner": "manual", "schedule": "1f1b"}
    pinned = {"dp 4": seconds(dp=4, planner="manual"), "tp 4": seconds(tp=4, planner="manual")}
    for pp, dp, tp in ((2, 2, 1), (2, 1, 2), (4, 1, 1)):
        for count in (n for n in (1, 2, 4) if 4 // dp % n == 0):
            pinned[f"pp {pp}, dp {dp}, tp {tp}, {count}"] = seconds(
                pp=pp, dp=dp, tp=tp, microbatches=count, **fixed
            )
    assert {name: s for name, s in pinned.items() if s < best * (1 - 1e-9)} == {}
