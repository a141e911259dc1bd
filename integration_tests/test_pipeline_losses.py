"""Numbers of the whole batch from pipelines that are planned, and that have other parallelisms inside their stages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import Tensor, nn
from zoo import CASES, causal

import meshwright as mw
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import verify

sys.path.append(str(Path(__file__).parents[1] / "packages" / "pipeline" / "tests"))
from loss_models import ADDING, OUTSIDE, WHOLE, WITH_NUMBERS, judged, judged_batch, judged_plan

ALL = ADDING | WHOLE | OUTSIDE | WITH_NUMBERS
NAMES = [
    "sum",
    "by hand",
    "class weights",
    "with a penalty",
    "products",
    "normalised",
    "second",
    "nested",
    "numbers",
]


def first_number(output: Any) -> Tensor:
    """The loss, wherever it stands."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return next(
        leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim() == 0 and leaf.requires_grad
    )


def check(rank: int, size: int, name: str, schedule: str, degrees: dict[str, int]) -> list[str]:
    plan = judged_plan(schedule, microbatches=2).replace(world_size=size, degrees={"pp": 2, **degrees})
    report = verify(
        lambda: judged(ALL[name]),
        judged_batch(0),
        plan,
        loss=first_number,
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05),
    )
    return [f"{name} {failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_data_ranks_share_uneven_rows(rank_pool: RankPool, name: str) -> None:
    for failures in rank_pool.run(4, check, name, "1f1b", {"dp": 2}):
        assert not failures


class Shares(nn.Linear):
    """A layer that returns its load-balancing loss."""

    def __init__(self) -> None:
        super().__init__(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = super().forward(x).softmax(-1)
        return x * shares, shares.mean(0).square().sum()


class Numbered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Shares() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = x.new_zeros(())
        for layer in self.layers:
            x, number = layer(x)
            total = total + number
        return x.square().mean() + 0.1 * total


def said(plan: mw.ParallelPlan) -> str:
    """What explain says, as one line."""
    return " ".join(str(mw.explain(plan)).split())


def planned(rank: int, size: int) -> list[str]:
    batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(3))}
    plan = plan_once(Numbered(), batch, cluster="laptop-cpu", pp=2)
    assert plan.pipeline is not None and plan.pipeline.microbatches == 1
    assert "one microbatch" in said(plan) and "'layers.0' computes a scalar from its rows" in said(plan)
    report = verify(Numbered, batch, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
def test_numbers_that_modules_make_are_planned_with_one_microbatch(rank_pool: RankPool) -> None:
    for failures in rank_pool.run(2, planned):
        assert not failures
    with pytest.raises(PlanError, match=r"'layers.0' computes a scalar from its rows.* nearest legal: 1"):
        mw.plan(
            Numbered(), {"x": torch.randn(8, 6)}, world_size=2, cluster="laptop-cpu", pp=2, microbatches=4
        )


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def normed(rank: int, size: int) -> list[str]:
    batch = {"x": torch.randn(8, 6, generator=torch.Generator().manual_seed(3))}
    plan = plan_once(Normed(), batch, cluster="laptop-cpu", pp=2)
    assert plan.pipeline is not None and plan.pipeline.microbatches == 1
    assert "'layers.0.1' normalises by the whole batch" in said(plan)
    report = verify(Normed, batch, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return [f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures]


@pytest.mark.slow
def test_statistics_of_the_batch_are_planned_with_one_microbatch(rank_pool: RankPool) -> None:
    for failures in rank_pool.run(2, normed):
        assert not failures


def mixtral() -> nn.Module:
    model = CASES["mixtral"].model()
    model.config.output_router_logits = True
    model.config.router_aux_loss_coef = 0.5
    return model


def balanced(rank: int, size: int, pins: dict[str, Any]) -> tuple[list[str], int]:
    """Load balancing of experts is a product of means over all tokens."""
    batch = causal(128)
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    batch["attention_mask"][0, :3] = 0
    torch.manual_seed(0)
    plan = plan_once(mixtral(), batch, cluster="laptop-cpu", pp=2, tp=1, cp=1, ep=1, **pins)
    assert plan.pipeline is not None
    report = verify(mixtral, batch, plan, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    return [
        f"{failure.kind} {failure.name} {failure.difference}" for failure in report.failures
    ], plan.pipeline.microbatches


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"microbatches": 1}, {"microbatches": 4}, {"microbatches": 2, "schedule": "zero-bubble"}]
)
def test_experts_are_balanced_over_the_whole_batch(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for failures, count in rank_pool.run(2, balanced, {"dp": 1, **pins}):
        assert not failures and count == pins["microbatches"]


@pytest.mark.slow
def test_experts_are_balanced_over_data_ranks(rank_pool: RankPool) -> None:
    for failures, _ in rank_pool.run(4, balanced, {"dp": 2, "microbatches": 2}):
        assert not failures
