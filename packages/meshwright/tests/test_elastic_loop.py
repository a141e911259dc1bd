"""`mw.elastic` goes on where a run ended, with other ranks, on the same batches and random numbers."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset

import meshwright as mw
from meshwright_checkpoint import CheckpointError, CorruptError
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


def resumed(rank: int, size: int, folder: str) -> tuple[dict[int, float], dict[str, str], str]:
    """`trained`, what was found damaged, and the log."""
    lines: list[str] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, elastic, runs = Lines(), mw.elastic, []

    def kept(*args: Any, **options: Any) -> Any:
        runs.append(elastic(*args, **options))
        return runs[-1]

    logging.getLogger("meshwright").addHandler(handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mw, "elastic", kept)
            losses, _ = trained(rank, size, folder)
    finally:
        logging.getLogger("meshwright").removeHandler(handler)
    return losses, runs[-1].damaged, "\n".join(lines)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-5] ^= 16
    path.write_bytes(data)


def ended(rank: int, size: int, folder: str) -> str:
    with pytest.raises(CorruptError) as error:
        trained(rank, size, folder)
    return str(error.value)


def test_a_damaged_checkpoint_is_left_out_by_all_ranks(rank_pool: RankPool, tmp_path: Path) -> None:
    ((whole, _),) = rank_pool.run(1, trained, str(tmp_path / "whole"))
    folder = tmp_path / "run"
    rank_pool.run(2, trained, str(folder), "shuffled", 7)
    assert {path.name for path in folder.glob("step-*")} == {"step-3", "step-6"}
    # the file of rank 1
    flip(file := folder / "step-6" / "data-00001.safetensors")
    before = file.read_bytes()
    told = rank_pool.run(2, resumed, str(folder))
    for losses, damaged, _ in told:
        assert losses == pytest.approx({step: whole[step] for step in range(3, STEPS)}, rel=1e-5)
        ((path, what),) = damaged.items()
        assert path == str(folder / "step-6") and "data-00001.safetensors: the stored values of" in what
    assert told[0][1] == told[1][1] and told[1][2] == ""
    assert "is left out, for it is damaged: " in told[0][2]
    assert f"2 ranks: going on from step 3, of {folder / 'step-3'}" in told[0][2]
    # nothing was removed, and it does not count as one that stays
    assert file.read_bytes() == before
    assert {path.name for path in folder.iterdir()} == {"step-6", "step-9", "step-11"}
    for step in (9, 11):
        flip(folder / f"step-{step}" / "data-00000.safetensors")
    for text in rank_pool.run(2, ended, str(folder)):
        assert "none to go on from" in text and all(f"step-{step}: " in text for step in (6, 9, 11))
    assert {path.name for path in folder.iterdir()} == {"step-6", "step-9", "step-11"}


def test_a_step_is_saved_again_next_to_its_damaged_checkpoint(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    for _ in mw.elastic(tmp_path, model=model, interval=2).steps(4):
        pass
    flip(tmp_path / "step-4" / "data-00000.safetensors")
    for _ in range(2):
        run = mw.elastic(tmp_path, model=model, interval=2)
        assert run.step == 2 and list(run.damaged) == [str(tmp_path / "step-4")]
        assert list(run.steps(4)) == [2, 3]
        assert Path(str(mw.latest(tmp_path))).name == "step-4-again-4"
        shutil.rmtree(tmp_path / "step-4-again-4")
    for step in run.steps(4):
        raise AssertionError(step)
    with pytest.raises(UsageError, match=r"was not written by mw\.elastic"):
        mw.save(tmp_path / "step-9", model=model).wait()
        mw.elastic(tmp_path, model=model)
    with pytest.raises(CheckpointError, match="step-9 does not fit"):
        mw.elastic(tmp_path, model=nn.Linear(2, 3))


def test_a_checkpoint_that_is_lost_after_a_break_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = mw.elastic(tmp_path, model=nn.Linear(1, 1), interval=1)

    def lost(for_silent: bool) -> None:
        raise CheckpointError("rank 1 does not answer")

    monkeypatch.setattr(run._states, "wait", lost)
    for step in run.steps(3):
        if step == 1:
            break
    assert caplog.messages == ["the last checkpoint is lost: rank 1 does not answer"]


def test_other_random_numbers_would_be_seen(rank_pool: RankPool, tmp_path: Path) -> None:
    ((whole, _),) = rank_pool.run(1, trained, str(tmp_path / "whole"))
    ((other, _),) = rank_pool.run(1, unrestored, str(tmp_path / "other"))
    assert other[4] != pytest.approx(whole[4], rel=1e-3)


def unrestored(rank: int, size: int, folder: str) -> tuple[dict[int, float], int]:
    trained(rank, size, folder, lost=4)
    load = mw.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "meshwright.runs.run_states.load", lambda path, **given: load(path, random=False, **given)
        )
        return trained(rank, size, folder)


def averaged(
    rank: int, size: int, folder: str, degrees: dict[str, int], with_average: bool, lost: int = STEPS
) -> list[list[float]]:
    """Loss, and loss of the average of the model, of each step until the ranks are lost; two optimizers."""
    mw.init()
    torch.manual_seed(0)
    batches = torch.randn(STEPS, 4, 6)
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    model = mw.auto_parallelize(model, batches[0], **degrees)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8)) if with_average else nn.Identity()
    first, *others = list(model.parameters())
    optimizers = [torch.optim.AdamW(others, lr=0.1), torch.optim.SGD([first], lr=0.1, momentum=0.9)]
    models = nn.ModuleDict({"model": model, "average": average})
    run = mw.elastic(folder, model=models, optimizer=optimizers, interval=3)
    losses = []
    for step in run.steps(STEPS):
        if step == lost:
            break
        loss = model(batches[step]).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if isinstance(average, AveragedModel):
            average.update_parameters(model)
        with torch.no_grad():
            losses.append([step, loss.item(), average(batches[step]).square().mean().item()])
    return losses


# a pipelined model cannot be copied
@pytest.mark.parametrize(("second", "with_average"), [("tp", True), ("pp", False)])
def test_several_models_and_optimizers_go_on(
    rank_pool: RankPool, tmp_path: Path, second: str, with_average: bool
) -> None:
    (whole,) = rank_pool.run(1, averaged, str(tmp_path / "whole"), {}, with_average)
    parts: dict[float, list[float]] = {}
    for degrees, lost in (({"zero": 3}, 5), ({second: 2}, STEPS)):
        losses = rank_pool.run(2, averaged, str(tmp_path / "parts"), degrees, with_average, lost)[0]
        parts |= {step: values for step, *values in losses}
    assert len(parts) == STEPS
    for step, *values in whole:
        assert parts[step] == pytest.approx(values, rel=1e-4), step


def test_what_a_checkpoint_cannot_lay_out_anew_is_no_state(rank_pool: RankPool, tmp_path: Path) -> None:
    for texts in rank_pool.run(2, refused, str(tmp_path)):
        assert "give it among the optimizers, optimizer=[...]" in texts[0]
        assert "model=torch.nn.ModuleDict({'model': model, 'average': ...})" in texts[1]


def refused(rank: int, size: int, folder: str) -> list[str]:
    mw.init()
    model = mw.auto_parallelize(nn.Linear(4, 4), torch.ones(2, 4), dp=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    texts = []
    for state in ({"second": optimizer}, {"average": AveragedModel(model)}):
        with pytest.raises(UsageError) as error:
            mw.elastic(folder, model=model, state=state)
        texts.append(str(error.value))
    with pytest.raises(UsageError, match="optimizers 0 and 1 of optimizer= have a parameter of shape"):
        mw.elastic(folder, model=model, optimizer=[optimizer, optimizer])
    return texts


def test_wrong_calls(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    scheduler = torch.optim.lr_scheduler.StepLR(torch.optim.SGD(model.parameters(), lr=0.1), 2)
    with pytest.raises(UsageError, match="interval=0 is not a number of steps"):
        mw.elastic(tmp_path / "run", model=model, interval=0)
    with pytest.raises(UsageError, match=r"state\['rate'\] is a float"):
        mw.elastic(tmp_path / "run", model=model, state={"rate": 0.1})
    with pytest.raises(UsageError, match="keep_last=0"):
        mw.elastic(tmp_path / "run", model=model, keep_last=0)
    run = mw.elastic(tmp_path / "run", model=model, state={"scheduler": scheduler}, interval=1)
    with pytest.raises(UsageError, match="list has no batch"):
        next(run.batches([], 2))
    steps = run.steps(3)
    assert [next(steps), next(steps)] == [0, 1]
    with pytest.raises(UsageError, match="runs already"):
        next(run.steps(3))
    steps.close()
    with pytest.raises(UsageError, match=r"has the state of \['scheduler'\], not of \[\]"):
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


def guarded(
    rank: int, size: int, folder: str, batches: list[Tensor], spike: float | None
) -> tuple[list[Any], int]:
    """Step and loss of each step that was not taken back, and how many batches were left out."""
    mw.init()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.4), nn.Linear(8, 4))
    mw.parallelize(model, ParallelPlan(world_size=size, degrees={"zero": size}, zero={"stage": 3}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    run = mw.elastic(folder, model=model, optimizer=optimizer, interval=3, spike=spike, rewinds=1)
    losses: list[Any] = []
    for step, batch in run.batches(batches, 15):
        loss = model(batch).square().mean()
        loss.backward()
        if run.rewind(loss):
            continue
        optimizer.step()
        optimizer.zero_grad()
        del losses[step:]
        losses.append(loss.item())
    return losses, run.left_out


def rows(*bad: int, value: float = float("nan")) -> list[Tensor]:
    """20 batches, of which these are bad."""
    torch.manual_seed(1)
    return [torch.randn(4, 6) * (value if number in bad else 1.0) for number in range(20)]


@pytest.mark.parametrize(("value", "spike"), [(float("nan"), None), (100.0, 5.0)])
def test_a_bad_loss_goes_back_and_leaves_batches_out(
    rank_pool: RankPool, tmp_path: Path, value: float, spike: float | None
) -> None:
    # the checkpoint before batch 13 has steps 0 to 11
    expected, _ = guarded(
        0, 1, str(tmp_path / "whole"), [b for n, b in enumerate(rows()) if n not in (12, 13)], None
    )
    for losses, left_out in rank_pool.run(2, guarded, str(tmp_path / "run"), rows(13, value=value), spike):
        assert left_out == 2 and losses == pytest.approx(expected, rel=1e-5)
    taken, left_out = guarded(0, 1, str(tmp_path / "other"), rows(13, value=100.0), None)
    assert left_out == 0 and max(taken) > 5 * max(expected)


class Killed(list[Tensor]):
    """Batches, and then an error."""

    def __iter__(self) -> Iterator[Tensor]:
        yield from super().__iter__()
        raise RuntimeError("killed")


def test_a_run_that_was_started_again_knows_its_losses(tmp_path: Path) -> None:
    """A spike soon after a start is one too: its median is that of the losses before."""
    bad = rows(13, value=100.0)
    expected, _ = guarded(0, 1, str(tmp_path / "whole"), bad, 5.0)
    with pytest.raises(RuntimeError, match="killed"):
        guarded(0, 1, str(tmp_path / "run"), Killed(bad[:12]), 5.0)
    # of step 12 before it went back, too
    (_, *losses), left_out = guarded(0, 1, str(tmp_path / "run"), bad, 5.0)
    assert left_out == 2 and losses == pytest.approx(expected[12:], rel=1e-5)


class OfRank(Counted):
    """Batches of global rows, and a place of each rank's own."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "file": torch.tensor([self.rank])}


def places(rank: int, size: int, folder: str, differ: bool) -> str:
    mw.init()
    run = mw.elastic(folder, model=nn.Linear(6, 6), interval=2)
    try:
        for _, _ in run.batches(OfRank(rank * differ), 3):
            pass
    except UsageError as error:
        return f"{run.step}: {error}"
    return ""


def test_a_loader_with_a_place_of_each_rank_is_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    assert rank_pool.run(2, places, str(tmp_path / "alike"), False) == ["", ""]
    for told in rank_pool.run(2, places, str(tmp_path / "run"), True):
        assert told.startswith("0: state_dict() of the loader differs between ranks")


def test_a_run_that_stays_bad_ends(tmp_path: Path) -> None:
    with pytest.raises(FloatingPointError, match="step 4: the loss is nan; the run went back 1 time before"):
        guarded(0, 1, str(tmp_path / "twice"), rows(4, 6), None)
    with pytest.raises(FloatingPointError, match="there is no checkpoint yet"):
        guarded(0, 1, str(tmp_path / "soon"), rows(1), None)
    model = nn.Linear(2, 2)
    for wrong in ({"spike": 0.5}, {"rewinds": -1}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            mw.elastic(tmp_path / "none", model=model, **wrong)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="outside of the loop"):
        mw.elastic(tmp_path / "none", model=model).rewind(1.0)


def other_options(rank: int, size: int, folder: str) -> list[str]:
    told = []
    for options in (
        {"interval": 5 + rank},
        {"state": {"rate": nn.Linear(1, 1)} if rank else {}},
        {"peer_copies": rank or None},
    ):
        with pytest.raises(UsageError) as error:
            mw.elastic(folder, model=nn.Linear(2, 2), **options)  # type: ignore[arg-type]
        told.append(str(error.value))
    return told


def test_other_options_on_another_rank_are_refused(rank_pool: RankPool, tmp_path: Path) -> None:
    for interval, state, copies in rank_pool.run(2, other_options, str(tmp_path)):
        assert interval.startswith("mw.elastic has interval=6 on rank 1, and interval=5 on rank 0;")
        assert "state=['rate'] on rank 1, and state=[] on rank 0" in state
        assert "peer_copies=1 on rank 1, and peer_copies=None on rank 0" in copies
