"""Parameters with a compute copy: a write to them, or to views of the copy, reaches the next forward or raises."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, RecomputeRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize

Tensor = torch.Tensor

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "zero1 in bfloat16": {"degrees": {"zero": 2}, "zero": {"stage": 1}, "precision": {"parameters": "bf16"}},
}


class Viewing(nn.Module):
    """A forward that computes from views of its parameters only."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 8)
        self.scale, self.shift = nn.Parameter(torch.rand(6)), nn.Parameter(torch.rand(6))
        self.table = nn.Parameter(torch.randn(16, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale.exp() + (self.scale + self.shift) + self.table[: x.shape[0]]
        x = x + torch.cat([self.scale, self.shift]).view(2, 6).sum(0)
        return self.linear(x) + x @ self.linear.weight.T + F.linear(x, self.linear.weight.view(8, 6)[:8])


def built(plan: str, make: Any = Viewing, **fields: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = make()
    parallelize(model, ParallelPlan(world_size=2, **{**PLANS[plan], **fields}))
    return model


def whole(x: Any) -> Tensor:
    actual: Tensor = x.full_tensor().detach()
    return actual


VIEWS = {"T": lambda p: p.T, "rows": lambda p: p[1:3], "flat": lambda p: p.view(-1)}
WRITES = {
    "zero_": lambda v: v.zero_(),
    "v[0] = 5": lambda v: v.__setitem__(0, 5.0),
    "v[mask] = 5": lambda v: v.__setitem__(torch.ones(v.shape, dtype=torch.bool), 5.0),
    "out": lambda v: torch.mul(torch.ones(v.shape), 3.0, out=v),
    "data": lambda v: v.data.zero_(),
    "data[0]": lambda v: v.data.__setitem__(0, 5.0),
    "detach": lambda v: v.detach().zero_(),
    "foreach": lambda v: torch._foreach_zero_([v]),
    "cumsum_": lambda v: v.cumsum_(0),
    "relu": lambda v: F.relu(v, inplace=True),
}


def lost(rank: int, world_size: int, plan: str) -> list[tuple[str, str]]:
    weight = built(plan).linear.weight
    with torch.no_grad():
        before = whole(weight)
    silent = []
    for name, view in VIEWS.items():
        for kind, write in WRITES.items():
            taken = view(weight)
            try:
                with torch.no_grad():
                    write(taken)
                silent.append((name, kind))
            except UnsupportedError as error:
                assert "would not reach the parameter" in str(error)
    with torch.no_grad():
        assert torch.equal(whole(weight), before)
    return silent


@pytest.mark.parametrize("plan", PLANS)
def test_write_to_a_view_of_a_compute_copy_raises(rank_pool: RankPool, plan: str) -> None:
    for silent in rank_pool.run(2, lost, plan):
        assert silent == []


THROUGH_VIEWS = {
    "column": lambda p: p[:, 1].zero_(),
    "transposed": lambda p: p.T.add_(1),
    "row": lambda p: p[0].zero_(),
    "data": lambda p: p.data[:, 1].zero_(),
    "detach": lambda p: p.detach().add_(1),
    "list": lambda p: torch._foreach_add_([p[:, 1]], 1.0),
}


def outdated(rank: int, world_size: int, plan: str) -> list[str]:
    """A penalty that is computed outside of the model's forward, after a write through a view."""
    wrong = []
    weight = built(plan).linear.weight
    for name, write in THROUGH_VIEWS.items():
        weight.square().sum()  # the copy is gathered
        with torch.no_grad():
            plain = whole(weight).clone()
            write(weight)
            write(plain)
        if not torch.allclose(whole(weight.square().sum()).float(), plain.square().sum(), rtol=2e-2):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("plan", PLANS)
def test_write_through_a_view_reaches_the_next_forward(rank_pool: RankPool, plan: str) -> None:
    for wrong in rank_pool.run(2, outdated, plan):
        assert wrong == []


def evaluated(rank: int, world_size: int, plan: str) -> None:
    model = built(plan)
    x = torch.linspace(-1, 1, 24).view(4, 6).to(torch.bfloat16 if "bfloat16" in plan else torch.float32)
    trained = model(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            actual = model(x)
            assert actual.dtype == trained.dtype == x.dtype
            assert torch.equal(whole(actual), whole(trained))


@pytest.mark.parametrize("plan", PLANS)
def test_evaluation_equals_a_training_forward(rank_pool: RankPool, plan: str) -> None:
    rank_pool.run(2, evaluated, plan)


class Turning(nn.Module):
    """A block that transposes its input in place: a second run on it would transpose it back."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x.transpose_(0, 1)))


class Around(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Turning()

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x * 1).square()


def turned(rank: int, world_size: int) -> None:
    x = torch.randn(4, 4, generator=seeded(2))
    torch.manual_seed(0)
    single = Around()
    single(x).sum().backward()
    many = built("zero3", Around)
    many(x).sum().backward()
    torch.testing.assert_close(whole(many.block.linear.weight.grad), single.block.linear.weight.grad)
    again = built("zero3", Around, recompute=(RecomputeRule(pattern="block"),))
    with pytest.raises(UnsupportedError, match="modified in place by the module itself"):
        again(x).sum().backward()


def test_input_transposed_in_place_is_not_recomputed(rank_pool: RankPool) -> None:
    rank_pool.run(2, turned)
