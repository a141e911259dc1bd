"""Optimizers on stages: those that step once for a backward pass are those of one device, those that search are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipe_models import Chain, chain_batch, chain_plan
from torch import optim

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing import RankPool
from meshwright_pipeline import pipeline

LIMIT = 1e-5


def step(optimizer: optim.Optimizer, model: torch.nn.Module, number: int) -> float:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**chain_batch(number))["loss"]
        loss.backward()
        return loss

    return float(optimizer.step(closure))  # type: ignore[arg-type]


def search(rank: int, size: int, options: dict[str, Any]) -> tuple[str, float]:
    """(what LBFGS is told, how far SGD with a closure, on the same parameters, is from one device afterwards)."""
    torch.manual_seed(0)
    one = Chain()
    torch.manual_seed(0)
    many = pipeline(Chain(), chain_plan())
    with pytest.raises(UnsupportedError) as error:
        step(optim.LBFGS(many.parameters(), lr=0.1, **options), many, 0)
    worst = 0.0
    runs = [(model, optim.SGD(model.parameters(), lr=0.1)) for model in (one, many)]
    for number in range(2):
        losses = [step(optimizer, model, number) for model, optimizer in runs]
        worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
    known = dict(one.named_parameters(remove_duplicate=False))
    for name, p in many.named_parameters():
        worst = max(worst, float((p - known[name]).abs().max() / known[name].abs().max()))
    # the negative control: what no pipeline divides is left alone
    step(optim.LBFGS(one.parameters(), lr=0.1), one, 0)
    return str(error.value), worst


@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}], ids=["plain", "wolfe"])
def test_an_optimizer_that_searches_is_refused(rank_pool: RankPool, options: dict[str, Any]) -> None:
    for told, worst in rank_pool.run(2, search, options, timeout=150):
        assert (
            "LBFGS.step(closure)" in told and "of its own stages only" in told and "plan without pp" in told
        )
        assert worst < LIMIT
