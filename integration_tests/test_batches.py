"""Batches that differ between ranks are found in the first step under every plan; rows of each data rank's own are global."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.testing.rank_pool import RankPool

ONE = {"dp": 1, "tp": 1, "cp": 1, "pp": 1, "zero": 0}
PLANS = {
    "dp": {"dp": 2},
    "tp": {"tp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "pp": {"pp": 2, "microbatches": 2},
    "pp-dp": {"pp": 2, "dp": 2, "microbatches": 2},
}


class Tokens(Dataset[Any]):
    """Rows of token ids, each its own labels."""

    def __init__(self, count: int) -> None:
        self.ids = torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.ids[index]}


def built(pins: dict[str, Any]) -> torch.nn.Module:
    torch.manual_seed(0)
    model = CASES["gpt2"].model()
    batch = {
        name: value[:4] for name, value in DataLoader(Tokens(4), batch_size=4).__iter__().__next__().items()
    }
    return mw.parallelize(model, plan_once(model, batch, cluster="laptop-cpu", **{**ONE, **pins}))


def own_batches(rank: int, size: int, pins: dict[str, Any]) -> str:
    """The error where every rank gives the model rows of its own, as with a DistributedSampler."""
    model, data = built(pins), Tokens(16)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=False)
    try:
        for batch in DataLoader(data, batch_size=4, sampler=sampler):
            model(**batch).loss.backward()
    except MeshwrightError as error:
        return str(error)
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_own_batches_on_each_rank_are_refused_in_the_first_step(rank_pool: RankPool, name: str) -> None:
    ranks = 4 if name == "pp-dp" else 2
    for told in rank_pool.run(ranks, own_batches, PLANS[name], timeout=100):
        assert "input_ids" in told and "mw.shard_loader(loader" in told and 'rows="local"' in told
        assert "rank 1" in told or "ranks of one stage" in told or "on rank 2" in told


def local_losses(rank: int, size: int, pins: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Losses where each data rank reads rows of its own, and those of one device on the same global batches."""
    data, data_ranks = Tokens(14), pins.get("dp", 1)
    data_rank = rank % data_ranks
    sampler = DistributedSampler(data, num_replicas=data_ranks, rank=data_rank, shuffle=False)
    loader = DataLoader(data, batch_size=4 // data_ranks, sampler=sampler, drop_last="pp" in pins)
    model = built(pins)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step, batch in enumerate(mw.shard_loader(loader, rows="local", model=model)):
        # the loader has drawn a number
        torch.manual_seed(step)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    torch.manual_seed(0)
    single = CASES["gpt2"].model()
    optimizer = torch.optim.SGD(single.parameters(), lr=0.1)
    expected = []
    for start in range(0, 12 if "pp" in pins else 14, 4):
        # row i of a DistributedSampler goes to data rank i % data_ranks
        rows = range(start, min(14, start + 4))
        order = [row for part in range(data_ranks) for row in rows if row % data_ranks == part]
        batch = {name: torch.stack([data[row][name] for row in order]) for name in ("input_ids", "labels")}
        torch.manual_seed(start // 4)
        loss = single(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    return losses, expected


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_local_rows_train_as_one_device(rank_pool: RankPool, name: str) -> None:
    ranks = 4 if name == "pp-dp" else 2
    for losses, expected in rank_pool.run(ranks, local_losses, PLANS[name], timeout=100):
        assert losses == pytest.approx(expected, rel=1e-5)
        # a wrong order of rows would change nothing of a mean, other rows would
        assert len(set(expected)) == len(expected)


def other_numbers(rank: int, size: int, pins: dict[str, Any]) -> tuple[str, str, str]:
    """The errors where ranks have other random numbers in training, in evaluation, and learning rates of their own."""
    model, batch = built(pins), next(iter(DataLoader(Tokens(4), batch_size=4)))
    told = []
    for training in (False, True):
        # a model that draws nothing needs no random numbers
        model.train(training)
        torch.manual_seed(rank)
        try:
            model(**batch).loss.backward()
            told.append("nothing")
        except MeshwrightError as error:
            told.append(str(error))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if rank != 1 else 0.2)
    torch.manual_seed(0)
    try:
        model(**batch).loss.backward()
        optimizer.step()
        told.append("nothing")
    except MeshwrightError as error:
        told.append(str(error))
    return told[0], told[1], told[2]


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PLANS))
def test_other_random_numbers_and_options_are_refused(rank_pool: RankPool, name: str) -> None:
    ranks = 4 if name == "pp-dp" else 2
    for evaluated, trained, stepped in rank_pool.run(ranks, other_numbers, PLANS[name], timeout=100):
        assert evaluated == "nothing"
        assert "the model draws from them" in trained and "torch.manual_seed" in trained
        assert stepped.startswith("rank 1 steps AdamW with lr=0.2 in group 0, rank 0 with lr=0.1")
