"""State that code between units writes matches one device on every rank: counters, and new buffers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from mixing_models import WIDTH, batch, plan
from torch import Tensor, nn

from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline

LIMIT = 1e-5


class Scheduled(nn.Module):
    """Scales by its number of calls, before and after its layers; counts at its start or end."""

    def __init__(self, early: bool, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.early, self.inside = early, inside
        self.calls, self.rate, self.warm = 0, 0.5, True

    def count(self) -> None:
        self.calls, self.rate, self.warm = self.calls + 1, self.rate * 0.9, self.calls < 1

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.early:
            self.count()
        x = x * (1 + 0.1 * self.calls)
        for layer in self.layers:
            x = layer(x) * (2.0 if self.warm else 1.0)
        x = x * self.rate
        if not self.early:
            self.count()
        return F.mse_loss(x, y) if self.inside else x


def count(rank: int, size: int, early: bool, inside: bool, told: bool = True) -> tuple[float, bool]:
    """Largest distance of a result or gradient to one device, and whether the counters are the same."""
    torch.manual_seed(0)
    single = Scheduled(early, inside)
    torch.manual_seed(0)
    many = pipeline(Scheduled(early, inside), plan(1))
    if not told:
        call_of(many)._write_state = lambda *values: None
    worst = 0.0
    for number in range(4):
        with torch.set_grad_enabled(number != 2):
            results = [model(**batch(number)) for model in (single, many)]
        worst = max(
            worst, float((results[0] - results[1]).detach().abs().max() / results[0].detach().abs().max())
        )
        if number != 2:
            for out in results:
                out.square().sum().backward()
    expected = dict(single.named_parameters())
    for name, p in many.named_parameters():
        worst = max(
            worst, float((p.grad - expected[name].grad).abs().max() / expected[name].grad.abs().max())
        )
    same = all(
        (type(a), a) == (type(b), b)
        for a, b in zip(
            (single.calls, single.rate, single.warm), (many.calls, many.rate, many.warm), strict=True
        )
    )
    return worst, same


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("early", [True, False], ids=["at the start", "at the end"])
def test_counters_match_one_device(rank_pool: RankPool, early: bool, inside: bool) -> None:
    for worst, same in rank_pool.run(2, count, early, inside):
        assert worst < LIMIT and same


def test_counters_differ_if_writes_are_not_sent(rank_pool: RankPool) -> None:
    """The negative control: the first rank never comes to the end of a forward."""
    (worst, same), _ = rank_pool.run(2, count, False, True, False)
    assert not same and worst > 100 * LIMIT


class Late(nn.Module):
    """In its first forward it creates a computed buffer, and a constant one that each rank may create."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        for name in ("mean", "steps"):
            self.register_buffer(name, None)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.steps is None:
            self.steps = torch.arange(WIDTH) / WIDTH
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place == 2:
                now = x.detach().mean(0)
                self.mean = now if self.mean is None else 0.9 * self.mean + 0.1 * now
        return F.mse_loss(x * self.steps, y)


def make(rank: int, size: int) -> tuple[float, tuple[tuple[str, str], ...]]:
    torch.manual_seed(0)
    single = Late()
    torch.manual_seed(0)
    many = pipeline(Late(), plan(1))
    for number in range(3):
        single(**batch(number))
        many(**batch(number))
    (prepared,) = call_of(many).preparation._prepared.values()
    return float(
        (single.mean - many.mean).abs().max() / single.mean.abs().max()
    ), prepared.profile.kept.buffers


def test_buffer_created_by_a_forward_matches_one_device(rank_pool: RankPool) -> None:
    for worst, buffers in rank_pool.run(2, make):
        assert worst < LIMIT and buffers == (("", "mean"),)
