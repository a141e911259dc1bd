"""ZeRO on real ranks: the training loop of one device, with states, gradients and parameters shared between ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_models import make, plan_of
from test_apply import loop, same

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing import RankPool
from meshwright_parallel import clip_grad_norm_, parallelize

STAGES = (1, 2, 3)


def zero_plan(stage: int, **degrees: int) -> ParallelPlan:
    return plan_of(degrees=degrees, zero={"stage": stage})


def trained(rank: int, world_size: int, plan: ParallelPlan, dropout: float) -> Any:
    dtype = torch.float64
    expected = loop(make(dropout, dtype), torch.nn.utils.clip_grad_norm_)
    return expected, loop(parallelize(make(dropout, dtype), plan), clip_grad_norm_)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("degrees", [{"zero": 2}, {"dp": 2, "zero": 2}, {"zero": 2, "tp": 2}, {"zero": 4}])
def test_training_is_that_of_one_device(rank_pool: RankPool, stage: int, degrees: dict[str, int]) -> None:
    world_size = 2 if degrees == {"zero": 2} else 4
    for expected, found in rank_pool.run(world_size, trained, zero_plan(stage, **degrees), 0.3):
        same(found, expected)
