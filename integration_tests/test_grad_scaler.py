"""torch's GradScaler on sharded gradients: scales, skips a step on all ranks, and grows as on one device."""

from __future__ import annotations

import pytest
import torch
from plan_once import one_and_many
from torch import Tensor, nn

from meshwright_dtensor.testing.rank_pool import RankPool


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))


def steps(model: nn.Module) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    values: list[Tensor] = []
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(torch.arange(24.0).reshape(4, 6).sin()).square().mean()).backward()
        if step == 1:
            # held by one rank where the weight is sharded
            with torch.no_grad():
                model[0].weight.grad[0, 0] = float("inf")
        scaler.unscale_(optimizer)
        values.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        scaler.step(optimizer)
        scaler.update()
        values += [torch.tensor(scaler.get_scale()), *model.parameters()]
    return [(x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone() for x in values[-6:]]


def check(rank: int, size: int, pins: dict[str, int]) -> bool:
    single, many = one_and_many(build, (torch.zeros(4, 6),), **pins)
    expected, actual = steps(single), steps(many)
    return all(torch.allclose(a, b, rtol=1e-5) for a, b in zip(actual, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {"dp": 2, "zero": 3}], ids=["dp", "tp", "zero3"])
def test_gradients_are_scaled_as_on_one_device(rank_pool: RankPool, pins: dict[str, int]) -> None:
    assert rank_pool.run(2, check, pins, timeout=60) == [True, True]
