"""Derivatives of gradients under data, ZeRO and tensor parallelism: gradient penalties, Hessian products, MAML."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from plan_once import one_and_many
from torch import Tensor, nn
from torch.autograd import forward_ad

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6), nn.LayerNorm(6)) for _ in range(2)
        )
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        score: Tensor = self.out(x)
        return score


def inputs() -> Tensor:
    return torch.arange(36, dtype=torch.float64).sin().reshape(6, 6)


def penalty_of_inputs(model: nn.Module) -> list[Any]:
    """WGAN-GP (Gulrajani et al. 2017, equation 3)."""
    x = inputs().requires_grad_()
    scores = model(x)
    (slope,) = torch.autograd.grad(scores.sum(), x, create_graph=True)
    penalty = ((slope.norm(2, dim=1) - 1) ** 2).mean()
    (scores.mean() + 10 * penalty).backward()
    return [penalty, *(p.grad for p in model.parameters())]


def penalty_of_parameters(model: nn.Module) -> list[Any]:
    loss = model(inputs()).square().mean()
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    penalty = sum(g.square().sum() for g in gradients)
    (loss + 0.1 * penalty).backward()
    return [penalty, *gradients, *(p.grad for p in model.parameters())]


def hessian_product(model: nn.Module) -> list[Any]:
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(model(inputs()).square().mean(), parameters, create_graph=True)
    vectors = [torch.ones(p.shape, dtype=p.dtype) for p in parameters]
    return list(torch.autograd.grad(gradients, parameters, vectors))


def step_in_the_loss(model: nn.Module) -> list[Any]:
    """MAML (Finn et al. 2017): the gradient goes through a step of SGD."""
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(model(inputs()).square().mean(), parameters, create_graph=True)
    stepped = {n: p - 0.1 * g for n, p, g in zip(names, parameters, gradients, strict=True)}
    loss = torch.func.functional_call(model, stepped, (inputs().flip(0),)).square().mean()
    loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


USES: list[Callable[[nn.Module], list[Any]]] = [
    penalty_of_inputs,
    penalty_of_parameters,
    hessian_product,
    step_in_the_loss,
]


def plain(x: Any) -> Tensor:
    whole: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return whole.detach()


def check(rank: int, size: int, pins: dict[str, int]) -> list[str]:
    wrong = []
    for use in USES:
        single, many = one_and_many(lambda: Critic().double(), {"x": inputs()}, **pins)
        pairs = zip(map(plain, use(many)), map(plain, use(single)), strict=True)
        wrong += [f"{use.__name__}: {a} for {b}" for a, b in pairs if not torch.allclose(a, b, rtol=1e-11)]
        # the negative control: the second derivatives matter
        if use is penalty_of_parameters:
            grads = [plain(p.grad) for p in many.parameters()]
            many.zero_grad()
            many(inputs()).square().mean().backward()
            assert not any(map(torch.allclose, grads[:2], [plain(p.grad) for p in many.parameters()]))
    with (
        pytest.raises(UnsupportedError, match=r"use torch\.autograd\.grad") if "dp" in pins else nullcontext()
    ):
        many(inputs()).square().mean().backward(create_graph=True)
    return wrong


PLANS = [
    (2, {"dp": 2}),
    (2, {"tp": 2}),
    (2, {"dp": 2, "zero": 1}),
    (2, {"dp": 2, "zero": 3}),
    (4, {"dp": 2, "zero": 2, "tp": 2}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "pins"), PLANS)
def test_derivatives_of_gradients_are_those_of_one_device(
    rank_pool: RankPool, size: int, pins: dict[str, int]
) -> None:
    for wrong in rank_pool.run(size, check, pins, timeout=100):
        assert not wrong, "\n".join(wrong[:5])


def forward_mode(rank: int, size: int) -> None:
    single, many = one_and_many(lambda: Critic().double().requires_grad_(False), {"x": inputs()}, tp=size)
    ones = torch.ones_like(inputs())
    values = torch.func.jvp(single, (inputs(),), (ones,))
    assert values[1].abs().max() > 0.1
    with pytest.raises(UnsupportedError, match=r"forward-mode derivatives.*use reverse mode"):
        torch.func.jvp(many, (inputs(),), (ones,))
    with forward_ad.dual_level():
        with pytest.raises(UnsupportedError, match=r"forward-mode derivatives.*use reverse mode"):
            many(forward_ad.make_dual(inputs(), ones))
        # an input that has none is as ever
        torch.testing.assert_close(plain(many(inputs())), single(inputs()))


@pytest.mark.slow
def test_forward_mode_derivatives_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, forward_mode)
