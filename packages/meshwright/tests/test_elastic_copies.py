"""`mw.elastic(peer_copies=)` goes on from copies in the memory of hosts, across plans and numbers of ranks."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright_checkpoint import CheckpointError
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.peer_copies.host_folder import HostFolder
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 12
PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 1}},
    "tp": {
        "degrees": {"dp": 2, "tp": 2},
        "parameters": (ParameterRule(pattern="0.weight", placement={"tp": "S(0)"}),),
    },
    "zero": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
}


def trained(
    rank: int, size: int, folder: str, plan: str, lost: int = STEPS, interval: int = 100, bad: int = -1
) -> dict[int, float]:
    """Losses by step until the ranks are `lost`; rank // 2 is the host. The loss of step `bad` is none to train on, once."""
    mw.init()
    torch.manual_seed(0)
    rows = torch.randn(24, 6)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 6))
    mw.parallelize(model, ParallelPlan(world_size=size, **PLANS[plan]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    memory = Path(folder, f"memory-{rank // 2}")
    memory.mkdir(parents=True, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank // 2))
        patch.setattr("meshwright.runs.run_states.PeerCopies", partial(PeerCopies, memory=memory))
        run = mw.elastic(
            Path(folder, "run"),
            model=model,
            optimizer=optimizer,
            state={"scheduler": scheduler},
            interval=interval,
            peer_copies=1,
        )
    losses = {}
    for step, batch in run.batches(DataLoader(rows, batch_size=8, shuffle=True), STEPS):
        if step == lost:
            assert run._states.copies is not None
            run._states.copies.wait()
            break
        loss = (model(batch) - batch.sin()).square().mean()
        if step == bad and run.rewind(float("nan")):
            bad = -1
            continue
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step] = loss.item()
    return losses


def held(folder: Path) -> set[int]:
    """The steps with files in memory."""
    return {int(path.name.split("-")[1]) for path in folder.glob("memory-*/*/*/*.own")}


def test_a_run_goes_on_with_the_hosts_that_are_left(rank_pool: RankPool, tmp_path: Path) -> None:
    (whole,) = rank_pool.run(1, trained, str(tmp_path / "whole"), "dp")
    assert list(whole) == list(range(STEPS)) and held(tmp_path / "whole") == set()
    folder = tmp_path / "run"
    parts = dict(rank_pool.run(4, trained, str(folder), "tp", 5)[0])
    assert held(folder) == {4, 5}
    for size, plan, lost, lost_host in ((2, "zero", 8, 1), (4, "tp", 10, None), (2, "zero", STEPS, 0)):
        # no step is lost, and there is no checkpoint in the folder
        if lost_host is not None:
            shutil.rmtree(folder / f"memory-{lost_host}")
        if lost_host == 0:
            (folder / "memory-1").rename(folder / "memory-0")
        assert mw.latest(folder / "run") is None
        losses = rank_pool.run(size, trained, str(folder), plan, lost)[0]
        assert list(losses) == list(range(len(parts), lost))
        parts |= losses
        for memory in folder.glob("memory-*/*/*"):
            # two copies, each of two ranks of the host and two of another one
            assert len([path for path in memory.iterdir() if path.suffix in (".own", ".peer")]) <= 8
    assert parts == pytest.approx(whole, rel=1e-5)
    # the last checkpoint has it all
    assert held(folder) == set() and mw.latest(folder / "run") is not None


def test_without_the_copies_it_goes_on_from_the_folder(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(4, trained, str(tmp_path), "tp", 7, 3)
    for host in (0, 1):
        shutil.rmtree(tmp_path / f"memory-{host}")
    assert list(rank_pool.run(2, trained, str(tmp_path), "zero", 8, 3)[0]) == [6, 7]


def test_copies_from_before_a_rewind_are_dropped(rank_pool: RankPool, tmp_path: Path) -> None:
    losses = rank_pool.run(2, trained, str(tmp_path), "zero", 6, 3, 5)[0]
    # from step 5 back to 3, and from there to 6
    assert list(losses) == [0, 1, 2, 3, 4, 5] and held(tmp_path) == {5, 6}
    names = [path.name for path in tmp_path.glob("memory-0/*/*/*.own")]
    assert names and all(name.startswith("00000002-") for name in names)


def refused(rank: int, size: int, folder: str) -> str:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError) as error:
        # one host has too little
        patch.setattr(HostFolder, "room", lambda folder: 1 << 10 if rank == 1 else 1 << 40)
        trained(rank, size, folder, "zero")
    return str(error.value)


def test_too_little_memory_is_said_at_the_start(rank_pool: RankPool, tmp_path: Path) -> None:
    texts = rank_pool.run(2, refused, str(tmp_path))
    assert all("room for 0.0 MiB" in text and "--shm-size" in text for text in texts)
    model = nn.Linear(2, 2)
    with pytest.raises(UsageError, match="peer_copies=0 is not a number of steps"):
        mw.elastic(tmp_path / "other", model=model, peer_copies=0)
