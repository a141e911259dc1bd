"""unparallelize() restores a model, and keeps what users have changed since."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel._torch.core import module_parts
from meshwright_parallel.placement.unparallelize import unparallelize


class Net(nn.Module):
    """Two layers, a tied weight and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)))


def described(model: nn.Module) -> list[Any]:
    """Names of the attributes and of the entries in the parts of every module."""
    actual: list[Any] = []
    for module in model.modules():
        parts = module_parts(module)
        names = sorted(name for name in vars(module) if name not in parts)
        actual.append((names, {name: [str(key) for key in part] for name, part in parts.items()}))
    return actual


def undone(rank: int, size: int, plan: ParallelPlan) -> None:
    torch.manual_seed(0)
    model = Net()
    before = described(model)
    parallelize(model, plan)
    model(torch.ones(4, 8)).sum().backward()
    mean = model.norm.running_mean.clone()
    again = unparallelize(model)
    assert described(model) == before
    assert model.first.weight is model.last.weight and not again.lost
    assert torch.equal(model.norm.running_mean, mean) and mean.any()
    with pytest.raises(UsageError, match="has not been parallelized"):
        unparallelize(model)
    again.restore()
    model.zero_grad()
    model(torch.ones(4, 8)).sum().backward()
    assert model.first.weight.grad is not None
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    model.first.weight.requires_grad_(False)
    model.eval()
    model.name = "mine"  # type: ignore[assignment]
    unparallelize(model)
    assert not model.training and model.name == "mine" and not model.first.weight.requires_grad
    assert isinstance(model.first.weight, nn.Parameter) and model.last.bias.requires_grad
    model(torch.ones(4, 8))
    assert calls == [1]
    parallelize(model, plan)
    model.first.extra = nn.Parameter(torch.ones(1))
    with pytest.raises(UsageError, match=r"'first.extra' was added or replaced"):
        unparallelize(model)
    assert model.parallel_plan == plan


def test_unparallelize_restores_the_model(rank_pool: RankPool) -> None:
    rank_pool.run(2, undone, ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": 3}))
