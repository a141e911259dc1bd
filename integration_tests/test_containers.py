"""Pipelines of models whose layers are never called themselves: each that is planned runs, and is one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from containers import MODELS, batch
from plan_once import plan_once

import meshwright as mw
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify

ALONE = {"dp": 1, "tp": 1, "cp": 1}


def check(
    rank: int, size: int, name: str, pins: dict[str, Any]
) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """What differs from one device in two steps, and the stages."""
    torch.manual_seed(0)
    plan = plan_once(MODELS[name](), batch(), cluster="laptop-cpu", **pins)
    assert plan.pipeline is not None
    report = verify(
        MODELS[name],
        batch(),
        plan,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        max_norm=1.0,
    )
    wrong = [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]
    return wrong, plan.pipeline.stages


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_planned_pipelines_are_one_device(rank_pool: RankPool, name: str) -> None:
    for wrong, stages in rank_pool.run(
        2, check, name, {"pp": 2, "microbatches": 2, "schedule": "1f1b", **ALONE}
    ):
        assert not wrong
        assert len(stages) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("dicts", {"dp": 2, "zero": 3}),
        ("raw", {"dp": 2, "zero": 3}),
        ("raw", {"tp": 2}),
        ("bypassed", {"tp": 2}),
        ("bypassed", {"dp": 2, "schedule": "zbv"}),
        ("dicts", {"dp": 2, "recompute": "full"}),
    ],
    ids=str,
)
def test_with_everything_around_them(rank_pool: RankPool, name: str, pins: dict[str, Any]) -> None:
    for wrong, _ in rank_pool.run(4, check, name, {"pp": 2, "microbatches": 2, **ALONE, **pins}):
        assert not wrong


def runs(rank: int, size: int, name: str, part: str, pins: dict[str, Any]) -> tuple[int, list[str]]:
    """How often a part of a layer runs in a step, and the patterns of what runs again."""
    torch.manual_seed(0)
    model, times = MODELS[name](), [0]
    plan = plan_once(model, batch(), cluster="laptop-cpu", recompute="full", **pins)
    mw.parallelize(model, plan, batch=batch())
    with torch.no_grad():
        model(**batch())
    module = model.get_submodule(part)
    module.register_forward_pre_hook(lambda *_: times.__setitem__(0, times[0] + 1))
    model(**batch()).backward()
    return times[0], [rule.pattern for rule in plan.recompute]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "part"), [("dicts", "layers.3.m"), ("bypassed", "layers.3.outer"), ("topmost", "parts.layers.3")]
)
def test_what_is_called_runs_again(rank_pool: RankPool, name: str, part: str) -> None:
    """Layers that are never called never run again either: their parts do."""
    ((times, patterns),) = rank_pool.run(1, runs, name, part, {})
    assert times == 2 and patterns


@pytest.mark.slow
def test_a_plan_may_name_parts_of_modules(rank_pool: RankPool) -> None:
    """A layer is cut in two, where a plan says so; what its forward does between its parts runs on both stages."""
    for wrong in rank_pool.run(2, inside, True):
        assert not wrong


def inside(rank: int, size: int, whole: bool) -> list[str]:
    """A plan that cuts a layer of a model in two, or names layers that are never called."""
    plan = ParallelPlan(
        world_size=2,
        degrees={"pp": 2},
        pipeline=PipelineRule(
            stages=[
                ["parts.embed", "parts.layers.[01]", "parts.layers.2.self_attn", "parts.layers.2.norm1"],
                ["parts.layers.2.linear[12]", "parts.layers.2.norm2", "parts.layers.3", "parts.head"],
            ]
            if whole
            else [["embed", "layers.[01]"], ["layers.[23]", "head"]],
            microbatches=2,
        ),
    )
    report = verify(MODELS["topmost" if whole else "bypassed"], batch(), plan)
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
def test_modules_that_are_never_called_are_told(rank_pool: RankPool) -> None:
    with pytest.raises(PlanError, match=r"'layers.0' itself is never called.*\(layers.0.\*\)"):
        rank_pool.run(2, inside, False)
