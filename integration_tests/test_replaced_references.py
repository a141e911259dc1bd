"""Parameters and buffers that a model holds outside of its modules' own: they train, and read, as on one device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from training_zoo import Swish

import meshwright as mw
from meshwright_dtensor.errors import StageError
from meshwright_dtensor.testing.rank_pool import RankPool


class InAList(nn.Module):
    """Modules in a plain list, whose parameters alone are registered."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(6, 6) for _ in range(3)]
        self.weights = nn.ParameterList(p for layer in self.layers for p in layer.parameters())

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


class InAPartial(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))
        self.first = functools.partial(F.linear, weight=self.weight)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class InAClosure(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        weight = self.weight = nn.Parameter(torch.randn(6, 6))
        self.first = lambda x: x @ Swish.apply(weight, 1.0)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x)))
        return y


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)
        self.tied = (self.first.weight, {"mean": self.norm.running_mean})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.second(torch.tanh(self.first(x)))) @ self.tied[0]
        return y - self.tied[1]["mean"]


class TiedWeight(Tied):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(torch.tanh(self.first(x))) @ self.tied[0]
        return y


MODELS: list[Callable[[], nn.Module]] = [InAList, InAPartial, InAClosure, Tied]


def batch() -> Tensor:
    return torch.arange(24, dtype=torch.float64).reshape(4, 6).sin()


def losses(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    values = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(batch()).square().mean()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        return make()
    finally:
        torch.set_default_dtype(torch.float32)


def check(rank: int, size: int, pins: dict[str, int]) -> list[str]:
    wrong = []
    for make in MODELS:
        model = build(make)
        plan = mw.plan(model, (batch(),), world_size=size, cluster="laptop-cpu", **pins)
        mw.parallelize(model, plan)
        single = build(make)
        pairs = zip(losses(model), losses(single), strict=True)
        wrong += [f"{make.__name__}: {a} for {b}" for a, b in pairs if a != pytest.approx(b, rel=1e-9)]
        # a copy has references of its own
        pairs = zip(losses(copy.deepcopy(model)), losses(copy.deepcopy(single)), strict=True)
        wrong += [
            f"copy of {make.__name__}: {a} for {b}" for a, b in pairs if a != pytest.approx(b, rel=1e-9)
        ]
    weight = model.tied[0]
    assert isinstance(weight, nn.Parameter) and weight.shape == (6, 6) and weight.requires_grad
    assert weight.grad is model.first.weight.grad
    assert torch.equal(weight, model.first.weight) and weight.placements == model.first.weight.placements
    with torch.no_grad():
        weight.zero_()
        weight.add_(1)
        assert model.first.weight.sum().item() == 36 and weight.detach().numpy().sum() == 36
    weight.grad = None
    assert model.first.weight.grad is None
    # another plan of the same model
    other = {"dp": 2} if "tp" in pins else {"tp": 2}
    plan = mw.plan(build(Tied), (batch(),), world_size=size, cluster="laptop-cpu", **other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer.zero_grad()
    mw.reshard(model, optimizer, plan)
    with torch.no_grad():
        single.first.weight.fill_(1)
    pairs = zip(losses(model), losses(single), strict=True)
    return wrong + [f"resharded: {a} for {b}" for a, b in pairs if a != pytest.approx(b, rel=1e-9)]


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=["dp", "tp", "zero3"])
def test_other_references_are_the_same_parameter(rank_pool: RankPool, pins: dict[str, int]) -> None:
    for wrong in rank_pool.run(2, check, pins, timeout=100):
        assert not wrong, "\n".join(wrong)


def staged(rank: int, size: int) -> str:
    model = build(TiedWeight)
    plan = mw.plan(model, (batch(),), world_size=size, cluster="laptop-cpu", pp=2, microbatches=1)
    mw.parallelize(model, plan)
    with pytest.raises(StageError) as error:
        model(batch())
    return str(error.value)


@pytest.mark.slow
def test_a_reference_to_a_parameter_of_another_stage_raises(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, staged, timeout=60):
        assert "first.weight is what rank 1 of the pipeline does not hold, rank 0 does" in told
