"""Random numbers are drawn in memory order: what a stage receives, and what rules compute, has that of one device."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 10), nn.Linear(10, 6), nn.Linear(5, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.dropout(self.second(torch.tanh(self.first(x))).transpose(1, 2))
        z: Tensor = self.dropout(self.third(y))
        return z


class SequenceFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout, self.out = nn.Embedding(11, 8), nn.Dropout(0.3), nn.Linear(8, 3)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1), 2)

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.out(self.encoder(self.dropout(self.embedding(ids % 11).transpose(0, 1))))
        return y


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.dropout = nn.Conv1d(5, 8, 3, padding=1), nn.Dropout(0.3)
        self.gru, self.out = nn.GRU(8, 7, batch_first=True), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.gru(self.dropout(self.conv(x).permute(0, 2, 1)))[0])
        return y


class ChannelsLast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(5, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.norm, self.dropout, self.out = nn.BatchNorm2d(6), nn.Dropout(0.3), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1).expand(-1, -1, -1, 4).contiguous(memory_format=torch.channels_last)
        x = self.dropout(self.norm(self.second(self.dropout(self.first(x)))))
        y: Tensor = self.out(x.mean((2, 3)))
        return y


class Normalised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.dropout = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(0.3)
        self.out = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.dropout(self.norm(self.first(x).transpose(1, 2))))
        return y


class FilledView(nn.Module):
    """A view with gaps is filled one number at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout, self.second = nn.Linear(6, 20), nn.Dropout(0.3), nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.zeros(*x.shape[:2], 21)
        noise[..., 1:].normal_()
        x = self.first(x) + noise[..., 1:]
        y: Tensor = self.second(self.dropout(torch.stack([x, x], -1)[..., 0]))
        return y


MODELS: list[Callable[[], nn.Module]] = [
    Transposed,
    SequenceFirst,
    Convolved,
    ChannelsLast,
    Normalised,
    FilledView,
]


def run(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)
    loss = model(x).square().mean()
    loss.backward()
    whole = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters()]
    return [loss.detach(), torch.rand(3), *whole]


def check(rank: int, size: int, pins: dict[str, int], microbatches: int) -> list[str]:
    wrong = []
    for make in MODELS:
        ids = make is SequenceFirst
        x = torch.arange(20).reshape(4, 5) if ids else torch.arange(120.0).reshape(4, 5, 6).sin()
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            models.append(make())
        options = (
            {"microbatches": 1 if make in (ChannelsLast, Normalised) else microbatches}
            if "pp" in pins
            else {}
        )
        plan = mw.plan(models[1], (x,), world_size=size, cluster="laptop-cpu", **pins, **options)
        mw.parallelize(models[1], plan)
        single, parallel = (run(model, x) for model in models)
        for a, b in zip(parallel, single, strict=True):
            a = a.full_tensor() if hasattr(a, "full_tensor") else a
            if not torch.allclose(a, b, rtol=1e-4, atol=1e-6):
                wrong.append(f"{make.__name__}: {a.flatten()[:3]} for {b.flatten()[:3]}")
    return wrong


PLANS = [({"dp": 2}, 1), ({"tp": 2}, 1), ({"dp": 2, "zero": 3}, 1), ({"pp": 2}, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("pins", "microbatches"), PLANS)
def test_dropout_after_other_memory_orders(
    rank_pool: RankPool, pins: dict[str, int], microbatches: int
) -> None:
    for wrong in rank_pool.run(2, check, pins, microbatches, timeout=100):
        assert not wrong, "\n".join(wrong)
