"""What the search finds among schedules and microbatches: as fast as the best of all that may be pinned."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from zoo import llama

import meshwright as mw
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan

SCHEDULES = ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv", "dualpipev")


class Deep(nn.Module):
    """Blocks whose products have so few rows that microbatches cost as much as the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(width: int, rows: int, planner: str = "eager", **pins: object) -> ParallelPlan | None:
    with mw.deferred_init():
        model = Deep(width)
    try:
        plan = mw.plan(
            model,
            {"x": torch.zeros(rows, width)},
            cluster="laptop-cpu",
            world_size=4,
            planner=planner,
            **pins,
        )  # type: ignore[arg-type]
    except (PlanError, UsageError):
        return None
    assert isinstance(plan, ParallelPlan)
    return plan


@pytest.mark.slow
@pytest.mark.parametrize(("width", "rows"), [(256, 16), (128, 1024)])
def test_schedule_and_microbatches_are_the_best_that_may_be_pinned(width: int, rows: int) -> None:
    """On few rows one microbatch is, on many rows several; and which schedule is depends on that."""
    pins = itertools.product(SCHEDULES, (1, 2, 4, 16))
    each = [planned(width, rows, "manual", pp=2, tp=2, schedule=s, microbatches=n) for s, n in pins]
    steps = [plan.predicted.step_seconds for plan in each if plan is not None and plan.predicted is not None]
    best = planned(width, rows, pp=2, tp=2)
    assert len(steps) > 16 and best is not None and best.predicted is not None and best.pipeline is not None
    assert best.predicted.step_seconds == pytest.approx(min(steps))
    assert (best.pipeline.microbatches == 1) == (rows == 16)


@pytest.mark.slow
def test_what_holds_too_much_in_large_microbatches_is_tried_in_small_ones() -> None:
    """Where memory is short, another schedule with more microbatches may be faster than the schedule tried first."""
    with torch.device("meta"):
        model = llama(
            vocab_size=32000, hidden_size=2048, num_hidden_layers=16, num_attention_heads=16, num_key_value_heads=16,
            intermediate_size=5504, max_position_embeddings=1024,
        )  # fmt: skip
        ids = torch.empty(128, 1024, dtype=torch.long)

    def seconds(**pins: object) -> float:
        plan = mw.plan(
            model, {"input_ids": ids, "labels": ids}, cluster="p3.16xlarge", world_size=8, precision="fp16",
            pp=2, tp=4, dp=1, cp=1, memory_limit="7GiB", **pins,
        )  # type: ignore[arg-type]  # fmt: skip
        assert isinstance(plan, ParallelPlan) and plan.predicted is not None
        return plan.predicted.step_seconds

    assert seconds() == pytest.approx(min(seconds(schedule=name) for name in ("1f1b", "zbv", "interleaved")))
