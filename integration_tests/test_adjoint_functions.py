"""Functions of the user whose backward calls modules again and differentiates by the parameters that it was given."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import one_and_many
from torch import Tensor, nn

from meshwright_dtensor.testing.rank_pool import RankPool


class Adjoint(torch.autograd.Function):
    """The value of a module; its gradients are computed by running it again, as solvers of differential equations do."""

    @staticmethod
    def forward(ctx: Any, module: nn.Module, x: Tensor, *parameters: Tensor) -> Any:
        ctx.module = module
        ctx.save_for_backward(x, *parameters)
        return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            inner = torch.autograd.grad(ctx.module(x), (x, *parameters), gradients, allow_unused=True)
        return None, *inner


class Solver(nn.Module):
    """Calls its field through the Function."""

    def __init__(self) -> None:
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Adjoint.apply(self.field, x, *self.field.parameters())
        return result.square().mean()


def compare(rank: int, size: int, pins: dict[str, int]) -> list[str]:
    """Names of the parameters whose gradients are not those of one device."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    single, parallel = one_and_many(Solver, x, **pins)
    assert type(next(parallel.parameters())).__module__ == "torch"  # opt_einsum reads it
    for model in (single, parallel):
        model(x).backward()
    gradients = {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}
    return [n for n, p in single.named_parameters() if not torch.allclose(p.grad, gradients[n], atol=1e-7)]


@pytest.mark.parametrize("pins", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1, "zero": 3}], ids=["tp2", "zero3"])
def test_parameters_of_an_adjoint_get_gradients(rank_pool: RankPool, pins: dict[str, int]) -> None:
    assert rank_pool.run(2, compare, pins) == [[], []]


def batched(rank: int, size: int) -> bool:
    """Whether gradients for a batch of output gradients are those of one device."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    seeds = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(2))
    results = []
    for model in one_and_many(lambda: Solver().field, x, dp=1, tp=2):
        inner = x.clone().requires_grad_()
        parameters = (inner, next(model.parameters()))
        results.append(torch.autograd.grad(model(inner), parameters, seeds, is_grads_batched=True))
    (a, b), (c, d) = results
    return torch.allclose(
        a, c.full_tensor() if hasattr(c, "full_tensor") else c, atol=1e-6
    ) and torch.allclose(b, d.full_tensor(), atol=1e-6)


def test_gradients_for_a_batch_of_gradients(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, batched) == [True, True]
