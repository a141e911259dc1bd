"""Planned, made parallel and evaluated inside of torch.inference_mode(), with dropout: values and masks of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

PINS: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2, "microbatches": 2},
}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.drop = nn.Embedding(16, 8), nn.Dropout(0.3)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.emb(x))
        for block in self.blocks:
            h = h + self.drop(torch.tanh(block(h)))
        return h


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    """In evaluation and in training, each twice."""
    torch.manual_seed(1)
    results: list[Any] = []
    for training in (False, True):
        model.train(training)
        with torch.inference_mode():
            results += [model(x), model(x)]
    return [getattr(y, "full_tensor", lambda y=y: y)().clone() for y in results]


def evaluate(rank: int, size: int, name: str) -> None:
    models: list[nn.Module] = []
    x = torch.arange(24).view(4, 6) % 16
    for parallel in (False, True):
        torch.manual_seed(0)
        model = Dropped()
        if parallel:
            with torch.inference_mode():
                model = mw.auto_parallelize(model, x + 0, cluster="laptop-cpu", **PINS[name])  # type: ignore[assignment]
        models.append(model)
    expected, given = (outputs(model, x) for model in models)
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-6)
    # masks differ from call to call, and evaluation has none
    assert torch.equal(expected[0], expected[1]) and not torch.equal(expected[2], expected[3])
    model = models[1].train()
    # trains as ever
    model(x).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("name", list(PINS))
def test_inside_of_inference_mode(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(2, evaluate, name)
