"""Models that read values of the batch (lengths, masks) in their modules, at another value in every batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import one_and_many
from test_unusual_modules import WIDTH, Block
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import meshwright as mw
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 5
LENGTHS = ([5, 3, 4, 1], [4, 4, 2, 3], [1, 2, 5, 5])


class Packed(nn.Module):
    """A packed sequence goes into the LSTM and comes out of it, with the lengths that the batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.lstm = Block(), nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.second, self.third = Block(), Block()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.first(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        y, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=STEPS)
        loss: Tensor = self.third(self.second(y)).square().mean()
        return loss


class PackingUnit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        y: Tensor = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0]
        return y


class PackedInside(nn.Module):
    """What a module returns is as long as the longest row."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = PackingUnit(), PackingUnit(), Block()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        loss: Tensor = self.third(self.second(self.first(x, lengths), lengths)).square().mean()
        return loss


class Chain(nn.Module):
    """The likelihood of a linear-chain conditional random field, whose mask is read."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        if not mask[:, 0].all():
            raise ValueError("the first step of a row is masked")
        score = x[:, 0]
        for step in range(1, STEPS):
            following = torch.logsumexp(score[:, :, None] + self.transitions + x[:, step, None], 1)
            score = torch.where(mask[:, step, None], following, score)
        return torch.logsumexp(score, 1).mean()


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.field = nn.ModuleList(Block() for _ in range(3)), Chain()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        loss: Tensor = self.field(x, torch.arange(STEPS) < lengths[:, None])
        return loss


class ReadsResult(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(x)
        assert x.abs().max() > 0, "all units are off"
        loss: Tensor = self.second(x).square().mean()
        return loss


MODELS = {model.__name__: model for model in (Packed, PackedInside, Tagger)}


def losses(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for batch in batches:
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(float(loss.detach()))
    return seen


def batches_of() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [
        (torch.randn(4, STEPS, WIDTH, dtype=torch.float64, generator=generator), torch.tensor(lengths))
        for lengths in LENGTHS
    ]


def check(rank: int, size: int, pins: dict[str, Any]) -> dict[str, tuple[list[float], list[float]]]:
    seen = {}
    for name, make in MODELS.items():
        single, parallel = one_and_many(lambda make=make: make().double(), batches_of()[0], **pins)
        seen[name] = losses(single, batches_of()), losses(parallel, batches_of())
    return seen


@pytest.mark.parametrize("pins", [{"pp": 2}, {"tp": 2}, {"dp": 2}], ids=str)
def test_they_train_as_on_one_device(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for seen in rank_pool.run(2, check, pins, timeout=100):
        for name, (expected, result) in seen.items():
            assert result == pytest.approx(expected, rel=1e-12), name


@pytest.mark.parametrize("name", ["Packed", "PackedInside"])
def test_microbatches_of_other_lengths_are_refused_when_planning(name: str) -> None:
    batch = batches_of()[0]
    with pytest.raises(PlanError, match=r"rows of the batch|other rows"):
        mw.plan(MODELS[name]().double(), batch, world_size=2, cluster="laptop-cpu", pp=2, microbatches=2)


def test_results_that_are_read_between_modules_are_refused_when_planning() -> None:
    with pytest.raises(PlanError, match=r"zeros stand for the results of its modules .*all units are off"):
        mw.plan(ReadsResult().double(), batches_of()[0], world_size=2, cluster="laptop-cpu", pp=2)
