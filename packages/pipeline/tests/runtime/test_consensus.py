"""Ranks that differ, and a rank that dies after the actions of a step: every rank gets the error, none hangs."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from pipe_models import Chain, chain_batch, chain_plan
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.errors import MeshwrightError, StageError
from meshwright_dtensor.testing.rank_pool import RankError, RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.runtime.agreement import Broadcast, StageRanks
from meshwright_pipeline.runtime.tied_grads import TiedSum


def differ(
    rank: int, size: int, other: int, what: str, warm: bool, schedule: str
) -> tuple[str, float, float]:
    """(error of this rank where rank `other` gets another batch, seconds, loss of the next step)."""
    torch.manual_seed(0)
    stages = size if schedule == "1f1b" else 2 * size
    many = pipeline(Chain(layers=stages), chain_plan(size, stages, stages, schedule=schedule))
    wrong = {
        "longer": chain_batch(tokens=9),
        "rows": {"ids": torch.tensor(3)},
        "labels": chain_batch() | {"labels": chain_batch()["labels"].byte()},
        "values": chain_batch() | {"labels": chain_batch()["labels"].flip(0)},
        "gradients": chain_batch(),
    }[what]
    if warm:
        for batch in (chain_batch(), chain_batch(tokens=9)):
            many(**batch)["loss"].backward()
    start, told = time.monotonic(), "nothing"
    try:
        with torch.set_grad_enabled(not (rank == other and what == "gradients")):
            many(**(wrong if rank == other else chain_batch()))
    except MeshwrightError as error:
        told = f"{type(error).__name__} {error}"
    took = time.monotonic() - start
    return told, took, many(**chain_batch())["loss"].item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("other", "what", "warm", "schedule"),
    [
        (1, "longer", True, "1f1b"),
        (0, "longer", False, "interleaved"),
        (2, "labels", True, "zbv"),
        (1, "values", False, "1f1b"),
        (0, "values", False, "zbv"),
        (2, "gradients", False, "1f1b"),
    ],
)
def test_different_batches_are_reported_on_every_rank(
    rank_pool: RankPool, other: int, what: str, warm: bool, schedule: str
) -> None:
    ranks = rank_pool.run(4, differ, other, what, warm, schedule, timeout=150)
    for told, took, after in ranks:
        assert told.startswith("StageError stage") and took < 20
        if what == "gradients":
            assert "call it alike on every rank" in told
        else:
            assert "give every rank the same" in told
        assert after == ranks[0][2]
    if what == "longer":
        both = "ids [8, 9] int64" in ranks[0][0] and "ids [8, 6] int64" in ranks[0][0]
        assert both and len({told for told, _, _ in ranks}) == 1


@pytest.mark.slow
def test_unsplittable_batch_is_reported_on_every_rank(rank_pool: RankPool) -> None:
    ranks = rank_pool.run(4, differ, 1, "rows", False, "1f1b", timeout=150)
    assert ranks[1][0].startswith("UsageError a batch without rows")
    for told, took, _ in (ranks[0], *ranks[2:]):
        assert (
            "stage 1 failed in the forward of microbatch 0, on rank 1: UsageError: a batch without rows"
            in told
        )
        assert took < 20


def kill(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die(rank: int, size: int, victim: int, where: str, folder: str) -> None:
    """A rank is killed in the second step, after all have agreed on the loss; every other writes its error to a file."""
    torch.manual_seed(0)
    many = pipeline(Chain(), chain_plan(ranks=4))
    many(**chain_batch())["loss"].backward()
    start = time.monotonic()
    if rank == victim:
        if where == "tied":
            TiedSum.sum = kill  # type: ignore[method-assign, assignment]
        else:
            Broadcast.send = Broadcast.receive = kill  # type: ignore[method-assign, assignment]
    try:
        with torch.set_grad_enabled(where == "tied"):
            many(**chain_batch(1))
    except StageError as error:
        Path(folder, str(rank)).write_text(f"{time.monotonic() - start:.1f} {error}")
    while len(list(Path(folder).iterdir())) < size - 1 and time.monotonic() < start + 60:
        time.sleep(0.05)  # stay alive until the other ranks have their error


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "where"), [(0, "tied"), (3, "outputs")])
def test_rank_that_dies_after_its_actions_is_reported(victim: int, where: str, tmp_path: Path) -> None:
    """The first holder of a tied weight, which sums its gradients; the rank of the last stage, which sends the result."""
    with RankPool(grace=30.0) as pool, pytest.raises(RankError, match=f"rank {victim}.*SIGKILL"):
        pool.run(4, die, victim, where, str(tmp_path), timeout=90)
    told = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    assert sorted(told) == [rank for rank in range(4) if rank != victim]
    for text in told.values():
        assert float(text.split()[0]) < 20
        assert re.search(f"on rank {victim}: .*died", text), text


def agree(rank: int, size: int, adds: bool) -> tuple[str | None, str | None]:
    """Errors in a stage of these ranks where the loss is additive on rank 0, and on others only if `adds`."""
    stage = StageRanks(init_device_mesh("cpu", (size,), mesh_dim_names=("tp",)))
    return stage.refusal("a batch", rank == 0 or adds), stage.refusal("a batch", adds)


def test_stage_ranks_with_different_losses_are_refused(rank_pool: RankPool) -> None:
    """One would run its backwards inside the step, the other after it."""
    told = [first for first, _ in rank_pool.run(2, agree, False)]
    assert "this one found that it does:" in str(told[0]) and "this one found that it does not:" in str(
        told[1]
    )
    assert rank_pool.run(2, agree, True) == [(None, None)] * 2
