"""Real ranks, one of which fails or dies during a save: all others raise, nothing is committed, nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import adam, build

from meshwright_checkpoint import CheckpointError, CorruptError, latest, load, save
from meshwright_checkpoint.io import direct_write
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.testing.rank_pool import RankError, RankPool


def failing(rank: int, size: int, folder: str, failing_rank: int, dies: bool) -> list[str]:
    """Errors of the handle and of the next save, after one rank fails or dies during its writes."""
    model = build("fsdp")
    save(f"{folder}/step-1", model=model, asynchronous=False)
    write = direct_write.Writer.write

    def fail(self: Any, data: Any) -> None:
        if dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(5, "Input/output error")

    if rank == failing_rank:
        direct_write.Writer.write = fail  # type: ignore[method-assign]
    try:
        handle = save(f"{folder}/step-2", model=model)
        messages = []
        if dies or rank == 0:  # the other rank raises in its next save
            try:
                handle.wait(60)
            except CheckpointError as error:
                messages.append(str(error))
                cause = error.__cause__
                assert isinstance(cause, OSError) or cause.rank in (None, failing_rank)  # type: ignore[union-attr]
        if dies:
            Path(folder, f"told-{rank}").write_text(messages[0])
            return messages
        try:
            save(f"{folder}/step-3", model=model)
        except CheckpointError as error:
            messages.append(str(error))
    finally:
        direct_write.Writer.write = write  # type: ignore[method-assign]
    save(f"{folder}/step-3", model=model, asynchronous=False)
    return messages


@pytest.mark.slow
@pytest.mark.parametrize("failing_rank", [0, 1])
def test_write_error_on_one_rank_fails_next_save(
    failing_rank: int, rank_pool: RankPool, tmp_path: Path
) -> None:
    for messages in rank_pool.run(2, failing, str(tmp_path), failing_rank, False):
        assert "the save before this one failed, and this one was not begun" in messages[-1]
        assert "Input/output error" in messages[0] or "rank 0 gave it up" in messages[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-1", "step-3"]


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_killed_rank_commits_nothing(killed: int, tmp_path: Path) -> None:
    with RankPool(grace=20.0) as pool, pytest.raises(RankError, match="SIGKILL"):
        pool.run(2, failing, str(tmp_path), killed, True)
    message = (tmp_path / f"told-{1 - killed}").read_text()
    assert "rank 1 died" in message or "rank 0 gave it up, or died" in message
    assert latest(tmp_path) == str(tmp_path / "step-1")
    save(
        tmp_path / "step-2", model=torch.nn.Linear(2, 2), asynchronous=False
    )  # the lock ended with its process
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def damaged(rank: int, size: int, folder: str) -> str:
    """Change a byte that only rank 1 reads."""
    path = Path(folder, "x")
    model = build("fsdp")
    save(path, model=model, asynchronous=False)
    if rank == 0:
        file = path / "data-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    dist.barrier()
    with pytest.raises(CorruptError) as caught:  # the same class on every rank
        load(path, model=model)
    return str(caught.value)


def test_damage_raises_corrupt_error_on_every_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    for message in rank_pool.run(2, damaged, str(tmp_path)):
        assert "are damaged" in message or "damage" in message


def unsavable(rank: int, size: int, folder: str) -> str:
    """Rank 0 has a value that cannot be saved."""
    with pytest.raises(UnsupportedError) as caught:
        save(
            f"{folder}/x",
            model=build("fsdp"),
            extra={"made": object()} if rank == 0 else {},
            asynchronous=False,
        )
    return str(caught.value)


def test_unsavable_value_raises_on_every_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    first, other = rank_pool.run(2, unsavable, str(tmp_path))
    assert "is of type object, which a checkpoint cannot hold" in first
    assert other.startswith("rank 0 failed: UnsupportedError") and not list(tmp_path.iterdir())


def apart(rank: int, size: int, folder: str) -> str:
    """Each rank loads another checkpoint."""
    model = build("fsdp")
    for step in range(2):
        save(f"{folder}/step-{step}", model=model, asynchronous=False)
    before = [p.to_local().clone() for p in model.parameters()]
    with pytest.raises(CheckpointError) as caught:
        load(f"{folder}/step-{rank}", model=model)
    assert all(torch.equal(a, p.to_local()) for a, p in zip(before, model.parameters(), strict=True))
    return str(caught.value)


def test_load_rejects_different_checkpoints_on_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    for message in rank_pool.run(2, apart, str(tmp_path)):
        assert "rank 1 has opened" in message and "which is another checkpoint" in message


def unlike(rank: int, size: int, folder: str) -> list[str]:
    """Ranks call save and load with different arguments."""
    model = build("fsdp")
    optimizer = adam(model)
    save(f"{folder}/step-0", model=model, optimizer=optimizer, asynchronous=False)
    messages = []
    for work in (
        lambda: save(f"{folder}/step-1", model=model, optimizer=optimizer if rank else None),
        lambda: save(f"{folder}/step-1", model=model, optimizer=optimizer if rank else None, backend="dcp"),
        lambda: save(f"{folder}/step-1", model=model, extra={"seen": 1} if rank else None),
        lambda: load(f"{folder}/step-0", model=model, optimizer=None if rank else optimizer),
        lambda: load(f"{folder}/step-0", model=model, only="first.*" if rank else None),
    ):
        with pytest.raises(UsageError) as caught:
            work()
        messages.append(str(caught.value))
    save(f"{folder}/step-1", model=model, extra=None if rank else {"seen": 1}, asynchronous=False)
    assert load(f"{folder}/step-1", model=model) == {"seen": 1}
    return messages


def test_save_and_load_reject_different_arguments_on_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    first, second = rank_pool.run(2, unlike, str(tmp_path))
    assert first == second and not (tmp_path / "step-1" / "data-00002.safetensors").exists()
    for text, part in zip(
        first,
        (
            "optimizer is given on ranks 1 of 2 only",
            "optimizer is given on ranks 1 of 2 only",
            "extra is given on rank 1 and not on rank 0",
            "optimizer is given on rank 0 and left out on rank 1",
            "only is None on rank 0 and ['first.*'] on rank 1",
        ),
        strict=True,
    ):
        assert part in text


def saved_of(rank: int, size: int, folder: str, width: int) -> None:
    torch.manual_seed(0)
    save(f"{folder}/{size}-{width}", model=torch.nn.Linear(width, 2)).wait()


def test_ranks_that_have_saved_in_other_worlds_save_together(rank_pool: RankPool, tmp_path: Path) -> None:
    rank_pool.run(2, saved_of, str(tmp_path), 1)
    for width in range(2, 8):
        # rank 0 forgets how two ranks share the writing, and rank 1 does not
        rank_pool.run(1, saved_of, str(tmp_path), width)
    rank_pool.run(2, saved_of, str(tmp_path / "again"), 1)
    assert latest(tmp_path / "again") == str(tmp_path / "again" / "2-1")
