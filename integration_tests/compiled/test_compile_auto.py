"""compile="auto": a model of streaming blocks and blocks of products, under plans that compile the first only."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

WIDTH = 64


class Streaming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(0.1)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        return x + self.dropout(torch.sigmoid(h) * torch.tanh(h)) * self.gain


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64 * WIDTH), nn.Linear(64 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.streaming = nn.ModuleList(Streaming() for _ in range(4))
        self.products = nn.ModuleList(Products() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in [*self.streaming, *self.products]:
            x = block(x)
        return x.pow(2).mean()


def made() -> nn.Module:
    torch.manual_seed(0)
    return Model()


def losses(model: nn.Module) -> list[float]:
    torch.manual_seed(7)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    values = []
    for step in range(4):
        loss = model(torch.randn(8, 16, WIDTH, generator=torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        values.append(loss.item())
    return values


def trained(rank: int, size: int, plan: str) -> int:
    """Compare with one device; the calls that ran compiled."""
    model = mw.parallelize(made(), ParallelPlan.from_json(plan))
    assert losses(model) == pytest.approx(losses(made()), abs=1e-6)
    rows = mw.debug.regions(model).rows
    # a stage holds two of the four blocks
    assert all(row.module.startswith("streaming.") for row in rows)
    return sum(row.compiled for row in rows)


@pytest.mark.parametrize("pins", [{"tp": 2}, {"pp": 2, "microbatches": 2}, {"zero": 3}], ids=str)
def test_losses_are_those_of_one_device(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    plan: Any = mw.plan(
        made(), torch.randn(8, 16, WIDTH), world_size=2, cluster="laptop-cpu", compile="auto", **pins
    )
    assert [rule.pattern for rule in plan.compile] == ["streaming.*"]
    recorded = plan.replace(
        compile=[{"pattern": rule.pattern, "backend": "aot_eager"} for rule in plan.compile]
    )
    assert min(rank_pool.run(2, trained, recorded.to_json())) > 0


def planned_here(rank: int, size: int) -> list[str]:
    """The first rank decides for all."""
    with pytest.raises(UsageError, match=r"'auto' \(by itself\)"):
        mw.auto_parallelize(made(), torch.randn(8, 16, WIDTH), compile="AUTO", tp=2)
    model: Any = mw.auto_parallelize(made(), torch.randn(8, 16, WIDTH), compile="auto", tp=2)
    return [rule.pattern for rule in model.parallel_plan.compile]


def test_all_ranks_of_a_job_get_one_decision(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, planned_here) == [["streaming.*"]] * 2
