"""Pipelines of models whose layers are never called themselves: each that is planned runs, and is one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from containers import MODELS, batch

import meshwright as mw
from meshwright_dtensor.testing import RankPool
from meshwright_parallel import verify

ALONE = {"dp": 1, "tp": 1, "cp": 1}


def check(
    rank: int, size: int, name: str, pins: dict[str, Any]
) -> tuple[list[str], tuple[tuple[str, ...], ...]]:
    """What differs from one device in two steps, and the stages."""
    torch.manual_seed(0)
    plan = mw.plan(MODELS[name](), batch(), world_size=size, cluster="laptop-cpu", **pins)
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


@pytest.mark.parametrize("name", MODELS)
def test_planned_pipelines_are_one_device(rank_pool: RankPool, name: str) -> None:
    for wrong, stages in rank_pool.run(
        2, check, name, {"pp": 2, "microbatches": 2, "schedule": "1f1b", **ALONE}
    ):
        assert not wrong
        assert len(stages) == 2
