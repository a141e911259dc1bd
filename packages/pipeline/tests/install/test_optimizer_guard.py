"""Optimizers on stages: with equally many closure calls they match one device, those that search are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pipe_models import Chain, chain_batch, chain_plan
from torch import optim

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool
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
    """(error of LBFGS, distance of SGD with a closure from one device afterwards)."""
    torch.manual_seed(0)
    single = Chain()
    torch.manual_seed(0)
    many = pipeline(Chain(), chain_plan())
    with pytest.raises(UnsupportedError) as error:
        step(optim.LBFGS(many.parameters(), lr=0.1, **options), many, 0)
    worst = 0.0
    runs = [(model, optim.SGD(model.parameters(), lr=0.1)) for model in (single, many)]
    for number in range(2):
        losses = [step(optimizer, model, number) for model, optimizer in runs]
        worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    for name, p in many.named_parameters():
        worst = max(
            worst, float((p - single_parameters[name]).abs().max() / single_parameters[name].abs().max())
        )
    # the negative control: a model without stages
    step(optim.LBFGS(single.parameters(), lr=0.1), single, 0)
    return str(error.value), worst


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"line_search_fn": "strong_wolfe"}], ids=["plain", "wolfe"])
def test_optimizer_that_searches_is_refused(rank_pool: RankPool, options: dict[str, Any]) -> None:
    for told, worst in rank_pool.run(2, search, options, timeout=150):
        assert (
            "LBFGS.step(closure)" in told and "of its own stages only" in told and "plan without pp" in told
        )
        assert worst < LIMIT


class Often(optim.Optimizer):
    """Calls its closure `times` times, or as often as its gradients decide."""

    def __init__(self, parameters: Any, times: int | None) -> None:
        super().__init__(parameters, {})
        self.times, self.calls = times, 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        parameters = [p for group in self.param_groups for p in group["params"]]
        with torch.enable_grad():
            loss = closure()
        shapes = sum(p.numel() for p in parameters if p.grad is not None)  # differs between stages
        for _ in range(shapes % 3 if self.times is None else self.times - 1):
            with torch.no_grad():
                for p in parameters:
                    p.sub_(p.grad, alpha=0.05)
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for p in parameters:
                p.sub_(p.grad, alpha=0.05)
        return loss


def often(rank: int, size: int, times: int | None) -> tuple[str, float]:
    """(error, distance of losses and parameters from one device)."""
    worst, told = 0.0, ""
    torch.manual_seed(0)
    single = Chain()
    torch.manual_seed(0)
    many = pipeline(Chain(), chain_plan())
    runs = [(model, Often(model.parameters(), times)) for model in (single, many)]
    try:
        for number in range(2):
            losses = [step(optimizer, model, number) for model, optimizer in runs]
            worst = max(worst, abs(losses[0] - losses[1]) / losses[0])
    except UnsupportedError as error:
        told = str(error)
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    for name, p in many.named_parameters():
        worst = max(
            worst,
            float(
                (p - single_parameters[name]).detach().abs().max()
                / single_parameters[name].detach().abs().max()
            ),
        )
    return told, worst


def test_unequal_closure_calls_are_an_error_on_every_rank(rank_pool: RankPool) -> None:
    for told, _ in rank_pool.run(2, often, None, timeout=100):
        assert "Often.step(closure)" in told and "differently often" in told and "plan without pp" in told


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
def test_equal_closure_calls_match_one_device(rank_pool: RankPool, times: int) -> None:
    for told, worst in rank_pool.run(2, often, times, timeout=100):
        assert not told and worst < LIMIT
