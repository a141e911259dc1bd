"""What the code between units writes to itself is what one device writes, on every rank: counters, and buffers made on the way."""

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
    """Scales by how often it has been called, before its layers and behind them; counts at its start or end."""

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
    one = Scheduled(early, inside)
    torch.manual_seed(0)
    many = pipeline(Scheduled(early, inside), plan(1))
    if not told:
        call_of(many)._write_state = lambda *values: None
    worst = 0.0
    for number in range(4):
        with torch.set_grad_enabled(number != 2):
            found = [model(**batch(number)) for model in (one, many)]
        worst = max(worst, float((found[0] - found[1]).detach().abs().max() / found[0].detach().abs().max()))
        if number != 2:
            for out in found:
                out.square().sum().backward()
    known = dict(one.named_parameters())
    for name, p in many.named_parameters():
        worst = max(worst, float((p.grad - known[name].grad).abs().max() / known[name].grad.abs().max()))
    same = all(
        (type(a), a) == (type(b), b)
        for a, b in zip((one.calls, one.rate, one.warm), (many.calls, many.rate, many.warm), strict=True)
    )
    return worst, same


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
@pytest.mark.parametrize("early", [True, False], ids=["at the start", "at the end"])
def test_counters_are_those_of_one_device(rank_pool: RankPool, early: bool, inside: bool) -> None:
    for worst, same in rank_pool.run(2, count, early, inside):
        assert worst < LIMIT and same


def test_without_being_told_ranks_count_differently(rank_pool: RankPool) -> None:
    """The negative control: the first rank never comes to the end of a forward."""
    (worst, same), _ = rank_pool.run(2, count, False, True, False)
    assert not same and worst > 100 * LIMIT


class Late(nn.Module):
    """Makes a buffer of what it has computed, in its first forward; and one that each rank may make itself."""

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
    one = Late()
    torch.manual_seed(0)
    many = pipeline(Late(), plan(1))
    for number in range(3):
        one(**batch(number))
        many(**batch(number))
    (known,) = call_of(many).preparation._prepared.values()
    return float((one.mean - many.mean).abs().max() / one.mean.abs().max()), known.profile.kept.buffers


def test_a_buffer_that_a_forward_makes_is_that_of_one_device(rank_pool: RankPool) -> None:
    for worst, buffers in rank_pool.run(2, make):
        assert worst < LIMIT and buffers == (("", "mean"),)
