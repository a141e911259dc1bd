"""Random numbers if modules change their mode after the first step, or use their own generator."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from mixing_models import WIDTH, batch, plan
from torch import Tensor, nn

from meshwright_dtensor.errors import MeshwrightError, UnsupportedError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline

LIMIT = 1e-5


class Dropping(nn.Linear):
    """A dropout module, and a functional dropout with its own probability."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.drop, self.rate = nn.Dropout(0.3), 0.2

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(self.drop(x)), self.rate, self.training)


class Layers(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def built(kind: type[nn.Module] = Dropping) -> Layers:
    torch.manual_seed(0)
    return Layers(kind)


def freeze(model: Layers) -> None:
    model.layers[0].eval()


def drop_more(model: Layers) -> None:
    for layer in model.layers:
        layer.drop.p, layer.rate = 0.6, 0.5


def drop_none(model: Layers) -> None:
    model.layers[0].drop.p = model.layers[3].drop.p = 0.0


def drop_all(model: Layers) -> None:
    model.layers[1].drop.p = 1.0


CHANGES: dict[str, Callable[[Layers], None]] = {
    f.__name__: f for f in (freeze, drop_more, drop_none, drop_all)
}


def change(rank: int, size: int, name: str) -> tuple[float, bool]:
    """Largest distance of a loss or gradient to one device, and whether the final generator states are equal."""
    losses, ends, gradients = [], [], []
    for model in (built(), pipeline(built(), plan(4))):
        torch.manual_seed(7)
        state = []
        for number in range(4):
            if number == 2:
                CHANGES[name](model)
            loss = model(**batch(number))
            loss.backward()
            state.append(loss.detach())
        losses.append(torch.stack(state))
        ends.append(torch.get_rng_state())
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    single, many = gradients
    worst = float((losses[0] - losses[1]).abs().max())
    worst = max(worst, *(float((g - single[n]).abs().max() / single[n].abs().max()) for n, g in many.items()))
    return worst, torch.equal(*ends)


@pytest.mark.parametrize("name", CHANGES)
def test_masks_match_one_device_after_a_mode_change(rank_pool: RankPool, name: str) -> None:
    for worst, same in rank_pool.run(2, change, name):
        assert worst < LIMIT and same


def vanish(rank: int, size: int) -> str:
    """The error if an operation is missing that ran when the model was profiled."""
    model = pipeline(built(), plan(4))
    model(**batch())
    model.layers[0].rate = 0.0
    with pytest.raises(MeshwrightError) as error:
        model(**batch(1))
    return str(error.value)


def test_missing_random_operations_are_rejected(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, vanish):
        assert "'layers.0' ran 1 random operations; when the model was profiled it ran 2" in told


GENERATOR = torch.Generator()


class Noisy(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(x.shape, generator=GENERATOR)


class Masking(nn.Linear):
    """With computed probabilities."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x * torch.empty_like(x).bernoulli_(torch.sigmoid(x.detach()))


class Default(Noisy):
    """Passes the default generator by name."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Linear.forward(self, x) + torch.empty_like(x).normal_(generator=torch.default_generator)


def refused(rank: int, size: int, count: int) -> list[str]:
    told = []
    for kind in (Noisy, Masking):
        GENERATOR.manual_seed(3)
        before = GENERATOR.get_state()
        with pytest.raises(UnsupportedError) as error:
            pipeline(built(kind), plan(count))(**batch())
        assert torch.equal(GENERATOR.get_state(), before)
        told.append(str(error.value))
    return told


@pytest.mark.parametrize("count", [1, 4])
def test_random_operations_that_cannot_be_replayed_are_rejected(rank_pool: RankPool, count: int) -> None:
    for state, computed in rank_pool.run(2, refused, count):
        assert "'layers.0' draws random numbers (randn) from its own generator" in state
        assert "'layers.0' calls the random operation bernoulli_" in computed


def named(rank: int, size: int) -> float:
    losses = []
    for model in (built(Default), pipeline(built(Default), plan(4))):
        torch.manual_seed(7)
        losses.append(torch.stack([model(**batch(number)).detach() for number in range(2)]))
    return float((losses[0] - losses[1]).abs().max())


def test_default_generator_may_be_passed_by_name(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, named)) < LIMIT
