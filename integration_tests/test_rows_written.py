"""Rows of a batch that are written to: planned without the degrees that divide them where writes would not arrive."""

from __future__ import annotations

import pytest
import torch
from plan_once import plan_once
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

ROWS, WIDTH = 8, 16


class Rows(nn.Module):
    """Writes to one row, or to some, in the way that is asked for."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.up, self.down, self.how = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH), how

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * 1.0
        if self.how == "view":
            h[3].zero_()
        elif self.how == "item":
            h[3] = 0.0
        elif self.how == "slice":
            h[2:5].mul_(0.5)
        return self.down(h).square().mean()


def example() -> Tensor:
    return torch.randn(ROWS, 3, WIDTH, generator=torch.Generator().manual_seed(1))


def worst(how: str, plan: ParallelPlan) -> float:
    """How far a step is from one device."""
    torch.manual_seed(0)
    alone = Rows(how)
    torch.manual_seed(0)
    model = mw.parallelize(Rows(how), plan)
    expected, loss = alone(example()), model(example())
    expected.backward()
    loss.backward()
    worst_difference = abs(float(loss.detach().full_tensor() - expected.detach()))
    for parameter, expected_parameter in zip(model.parameters(), alone.parameters(), strict=True):
        worst_difference = max(
            worst_difference, float((parameter.grad.full_tensor() - expected_parameter.grad).abs().max())
        )  # type: ignore[union-attr]
    return worst_difference


def planned(rank: int, size: int, how: str, pins: dict[str, int]) -> float:
    plan = plan_once(Rows(how), example(), cluster="laptop-cpu", **pins)
    assert isinstance(plan, ParallelPlan)
    return worst(how, plan)


def unplanned(rank: int, size: int, how: str) -> float:
    return worst(how, ParallelPlan(world_size=size, degrees={"dp": size}, strategies={"dp": "data"}))


@pytest.mark.parametrize("axis", ["dp", "zero"])
def test_a_view_of_a_row_is_refused_where_rows_are_divided(axis: str) -> None:
    with pytest.raises(
        PlanError,
        match=rf"degrees\.{axis} is 2: the model writes in place to a view of the batch rows \(__getitem__",
    ):
        mw.plan(Rows("view"), example(), cluster="laptop-cpu", world_size=2, **{axis: 2})


def test_a_plan_by_hand_gathers_the_rows(rank_pool: RankPool) -> None:
    """The planner keeps away from it: every write gathers the whole batch."""
    assert max(rank_pool.run(2, unplanned, "view")) < 1e-6


@pytest.mark.parametrize("how", ["view", "item", "slice"])
def test_what_is_planned_runs(rank_pool: RankPool, how: str) -> None:
    for pins in ({}, {"dp": 2}) if how != "view" else ({},):
        assert max(rank_pool.run(2, planned, how, pins)) < 1e-6
