"""`p.data = value`: what was taken before keeps the old values, as averages and swaps of weights expect; collectives by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from plan_once import one_and_many
from torch import Tensor, nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool

WIDTH = 6
PLANS: list[dict[str, Any]] = [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}, {"pp": 2}]


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def averaged(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Steps, an evaluation with averaged weights, the weights put back, two of them swapped, and one more step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    shadow = {name: p.data.clone() for name, p in model.named_parameters()}
    seen = []

    def step() -> None:
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())

    step()
    for name, p in model.named_parameters():
        shadow[name] = 0.9 * shadow[name] + 0.1 * p.data
    data, detached = {}, {}
    for name, p in model.named_parameters():
        data[name], detached[name] = p.data, p.detach()
        p.data = shadow[name]
    with torch.no_grad():
        seen.append(model(x))
    seen += [whole(detached["layers.1.weight"]), whole(shadow["layers.3.bias"])]
    for name, p in model.named_parameters():
        p.data = data[name]
    first, second = model.layers[1].weight, model.layers[1].bias
    first.data, second.data = second.data.expand(WIDTH, WIDTH).clone(), first.data[0].clone()
    a, b = model.layers[0].weight, model.layers[2].weight
    a.data, b.data = b.data, a.data
    step()
    return [whole(value) for value in (*seen, *model.parameters())]


def check(rank: int, size: int, pins: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    single, parallel = one_and_many(lambda: Chain().double(), x, **pins)
    pairs = zip(averaged(single, x), averaged(parallel, x), strict=True)
    return [(a.detach(), b.detach()) for a, b in pairs]


@pytest.mark.parametrize("pins", PLANS, ids=str)
def test_what_was_taken_before_keeps_its_values(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for pairs in rank_pool.run(2, check, pins, timeout=60):
        for expected, result in pairs:
            assert torch.allclose(result, expected, rtol=1e-12, atol=1e-14)


def average_gradients(rank: int, size: int) -> str:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    _, parallel = one_and_many(Chain, x, pp=size)
    parallel(x).backward()
    try:
        for p in parallel.parameters():
            dist.all_reduce(p.grad)
    except UnsupportedError as error:
        return str(error)
    return ""


def test_gradients_of_stages_are_not_summed_by_hand(rank_pool: RankPool) -> None:
    for message in rank_pool.run(2, average_gradients, timeout=60):
        assert "torch.distributed.all_reduce is given a value that only some pipeline stages hold" in message
