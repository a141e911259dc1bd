"""`mw.elastic` goes on where a run ended, with other ranks, on the same batches and random numbers."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import meshwright as mw
from meshwright_checkpoint import CheckpointError
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 11


class Noisy(Dataset[Tensor]):
    """22 rows, with random numbers of the moment when they are read."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, row: int) -> Tensor:
        return torch.linspace(-1, 1, 6) * row + torch.randn(6) * 0.1


class Counted:
    """A loader that finds its place by itself: batches 0, 1, 2, 3 of every epoch."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Tensor]:
        while self.at < 4:
            self.at += 1
            yield torch.full((4, 6), float(self.at))
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def loader_of(kind: str) -> Any:
    return Counted() if kind == "counted" else DataLoader(Noisy(), batch_size=4, shuffle=True)


def trained(
    rank: int,
    size: int,
    folder: str,
    kind: str = "shuffled",
    lost: int = STEPS,
    killed: int = -1,
    interval: int = 3,
) -> tuple[dict[int, float], int]:
    """Losses by step until the ranks are `lost`, and the signal; rank 0 has SIGTERM in step `killed`."""
    mw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4))
    mw.parallelize(model, ParallelPlan(world_size=size, degrees={"dp": size}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    run = mw.elastic(
        folder, model=model, optimizer=optimizer, state={"scheduler": scheduler}, interval=interval
    )
    losses = {}
    for step, batch in run.batches(loader_of(kind), STEPS):
        if step == lost:
            break
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.item()
        if step == killed and rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
    return losses, run.received


@pytest.mark.parametrize("kind", ["shuffled", "counted"])
def test_losses_are_those_of_a_run_that_never_ended(rank_pool: RankPool, tmp_path: Path, kind: str) -> None:
    ((whole, _),) = rank_pool.run(1, trained, str(tmp_path / "whole"), kind)
    assert list(whole) == list(range(STEPS))
    parts: dict[int, float] = {}
    # the second epoch of six batches begins in step 6: ended within both, and between them
    for size, lost, first in ((2, 5, 0), (1, 7, 3), (2, 9, 6), (1, STEPS, 9)):
        losses = rank_pool.run(size, trained, str(tmp_path / "parts"), kind, lost)[0][0]
        assert list(losses) == list(range(first, lost))
        parts |= losses
    assert parts == pytest.approx(whole, rel=1e-5)
    assert rank_pool.run(1, trained, str(tmp_path / "parts"), kind) == [({}, 0)]


def test_a_signal_on_one_rank_ends_all_after_the_step(rank_pool: RankPool, tmp_path: Path) -> None:
    ((whole, _),) = rank_pool.run(1, trained, str(tmp_path / "whole"))
    for losses, received in rank_pool.run(2, trained, str(tmp_path / "run"), "shuffled", STEPS, 4, 100):
        assert list(losses) == [0, 1, 2, 3, 4] and received == signal.SIGTERM
    assert Path(str(mw.latest(tmp_path / "run"))).name == "step-5"
    rest = rank_pool.run(2, trained, str(tmp_path / "run"))[0][0]
    assert rest == pytest.approx({step: whole[step] for step in range(5, STEPS)}, rel=1e-5)


def test_other_random_numbers_would_be_seen(rank_pool: RankPool, tmp_path: Path) -> None:
    ((whole, _),) = rank_pool.run(1, trained, str(tmp_path / "whole"))
    ((other, _),) = rank_pool.run(1, unrestored, str(tmp_path / "other"))
    assert other[4] != pytest.approx(whole[4], rel=1e-3)


def unrestored(rank: int, size: int, folder: str) -> tuple[dict[int, float], int]:
    trained(rank, size, folder, lost=4)
    load = mw.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("meshwright.elastic_loop.load", lambda path, **given: load(path, random=False, **given))
        return trained(rank, size, folder)


def test_wrong_calls(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="interval=0 is not a number of steps"):
        mw.elastic(tmp_path / "run", model=model, interval=0)
    with pytest.raises(UsageError, match=r"state\['rate'\] is a float"):
        mw.elastic(tmp_path / "run", model=model, state={"rate": 0.1})
    with pytest.raises(UsageError, match="keep_last=0"):
        mw.elastic(tmp_path / "run", model=model, keep_last=0)
    run = mw.elastic(tmp_path / "run", model=model, state={"optimizer": optimizer}, interval=1)
    with pytest.raises(UsageError, match="list has no batch"):
        next(run.batches([], 2))
    steps = run.steps(3)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(UsageError, match="runs already"):
        next(run.steps(3))
    steps.close()
    with pytest.raises(UsageError, match=r"has the state of \['optimizer'\], not of \[\]"):
        mw.elastic(tmp_path / "run", model=model)
    mw.save(tmp_path / "other" / "step-1", model=model).wait()
    with pytest.raises(UsageError, match="was not written by"):
        mw.elastic(tmp_path / "other", model=model)


def test_another_loader_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for _, _ in mw.elastic(tmp_path / "short", model=model, interval=1).batches([1, 2, 3, 4], 4):
        pass
    with pytest.raises(UsageError, match="4 batches of the epoch were taken before, and it has 2"):
        next(mw.elastic(tmp_path / "short", model=model).batches([1, 2], 5))
    for _, _ in mw.elastic(tmp_path / "placed", model=model, interval=1).batches(Counted(), 2):
        pass
    with pytest.raises(UsageError, match="and this list has none"):
        next(mw.elastic(tmp_path / "placed", model=model).batches([1, 2], 5))


def test_a_checkpoint_that_cannot_be_written_ends_the_loop(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    run = mw.elastic(tmp_path / "run", model=model, interval=1)
    (tmp_path / "run").write_text("a file")
    with pytest.raises(CheckpointError):
        list(run.steps(3))
