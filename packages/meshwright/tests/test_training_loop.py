"""The parts of the trainer's loop that need no ranks."""

from __future__ import annotations

import itertools
import json
import random
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
import torch
from torch import nn

import meshwright as mw
from meshwright.recipes.recipe_input import read_recipe
from meshwright.recipes.schema import Recipe
from meshwright.runs import run_states
from meshwright.runs.run_states import RunStates
from meshwright.training import loop
from meshwright.training.log import Log
from meshwright.training.loop import Run, evaluate, train
from meshwright_checkpoint.format.manifest import NAME, Manifest
from meshwright_checkpoint.peer_copies.copies import PeerCopies
from meshwright_checkpoint.storage.retention import Retention
from meshwright_dtensor.errors import InfeasibleError, UsageError

MODEL = """
import torch
from torch.nn import functional

class Model(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.table = torch.nn.Embedding(vocab_size, 8)

    def forward(self, input_ids, labels, **rest):
        logits = functional.dropout(self.table(input_ids), 0.1, self.training) @ self.table.weight.T
        return {"loss": functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}

def model(vocab_size):
    return Model(vocab_size)
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recipe:
    """A recipe in the current folder, which has a text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be")
    return read_recipe(["model.model_type=gpt2", "steps=4", "data=text.txt", "out=run"])


class Noisy(nn.Module):
    """Draws random numbers whether it is trained or not."""

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        return {"loss": x.sum() + torch.rand(()) + random.random() + np.random.rand()}


def test_training_has_the_same_random_numbers_after_an_evaluation(recipe: Recipe) -> None:
    model = Noisy()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    run = Run(
        recipe, torch.device("cpu"), model, optimizer, MagicMock(), iter([]), [{"x": torch.ones(2)}] * 2, {}
    )
    drawn = []
    for evaluated in (False, True):
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        if evaluated:
            assert evaluate(run) > 2 and model.training
        drawn.append((torch.rand(()).item(), random.random(), np.random.rand()))
    assert drawn[0] == drawn[1]


def test_a_function_without_labels_may_be_held_out(recipe: Recipe) -> None:
    padded, x = recipe.model_copy(update={"packing": False}), torch.ones(1)
    model = nn.Module()
    model.forward = lambda x, labels=None: {"loss": x.sum()}
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    held_out = [{"x": x}, {"x": 2 * x}]
    run = Run(padded, torch.device("cpu"), model, optimizer, MagicMock(), iter([]), held_out, {})
    assert evaluate(run) == 1.5
    run.held_out = [{"x": x, "labels": torch.ones(1, 3)}, {"x": 2 * x, "labels": torch.ones(1, 2)}]
    assert evaluate(run) == pytest.approx(4 / 3)


def trained(monkeypatch: pytest.MonkeyPatch, faults: dict[int, float], *words: str) -> list[dict[str, Any]]:
    """The records of a run of 12 steps; the losses of some are multiplied, by how manieth they are."""
    Path("model.py").write_text(MODEL)
    Path("text.txt").write_text("to be, or not to be" * 99)
    common = ["model=model.py:model", "data=text.txt", "steps=12", "batch_size=2", "sequence_length=8"]
    recipe = read_recipe([*common, "checkpoints.interval=3", "plan.dp=1", "out=run", *words])
    log, step, numbers = Log(recipe, True, True), loop.train_step, itertools.count(1)

    def faulty(run: Run, batches: Any) -> tuple[float, float]:
        loss, norm = step(run, batches)
        return loss * faults.get(next(numbers), 1.0), norm

    with monkeypatch.context() as patch:
        patch.setattr(loop, "train_step", faulty)
        try:
            assert train(recipe, log) == 0
        finally:
            log.close()
    return [json.loads(line) for line in Path(recipe.out, "metrics.jsonl").read_text().splitlines()]


NAN = float("nan")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bad", "factor", "words"), [(8, NAN, ["rewinds=1"]), (12, 50.0, ["rewinds=1", "spike=5.0"])]
)
def test_a_bad_step_goes_back_and_leaves_its_rows_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: int, factor: float, words: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = trained(monkeypatch, {bad: factor}, *words)
    (back,) = [record for record in records if "went_back" in record]
    saved = (bad - 1) // 3 * 3
    assert back["went_back"].startswith(f"step {bad}: the loss is ") and back["step"] == saved
    # the records of steps that were taken back are gone, and those of the run are whole
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 13))
    extra = Manifest.from_bytes(Path("run/checkpoints/step-12", NAME).read_bytes(), "here").extra
    assert (extra["step"], extra["rows_seen"]) == (12, 2 * (12 + bad - saved))
    assert len(extra["losses"]) == 12 * (len(words) - 1)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_out_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    constant = "schedule.name=constant"
    whole = trained(monkeypatch, {}, constant, "out=whole")
    trained(monkeypatch, {}, constant, "steps=6")
    file = tmp_path / "run/checkpoints/step-6/data-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-5] ^= 16
    file.write_bytes(data)
    records = trained(monkeypatch, {}, constant)
    ((told, record),) = [(r["damaged_checkpoints"], r) for r in records if "damaged_checkpoints" in r]
    assert record["step"] == 3 and [each["path"] for each in told] == [str(file.parent)]
    assert f"{file}: the stored values of" in told[0]["damage"] and file.read_bytes() == bytes(data)
    # the rows and losses of a run that never ended
    losses = {record["step"]: record["loss"] for record in records if "loss" in record}
    assert losses == pytest.approx({record["step"]: record["loss"] for record in whole})
    extra = Manifest.from_bytes(Path("run/checkpoints/step-12", NAME).read_bytes(), "here").extra
    assert (extra["step"], extra["rows_seen"]) == (12, 24)


@pytest.mark.slow
def test_passes_of_a_step_may_change_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # whose losses are equal for any number of passes
    monkeypatch.setattr("test_training_loop.MODEL", MODEL.replace("0.1", "0.0"))
    words = ["schedule.name=constant", "batch_size=4"]
    whole = trained(monkeypatch, {}, *words, "out=whole")
    trained(monkeypatch, {}, *words, "steps=6", "accumulate=2")
    records = trained(monkeypatch, {}, *words, "accumulate=4")
    losses = {record["step"]: record["loss"] for record in records}
    assert losses == pytest.approx({record["step"]: record["loss"] for record in whole}, rel=1e-5)


def test_where_no_plan_fits_more_passes_are_named(recipe: Recipe) -> None:
    halves = recipe.model_copy(update={"accumulate": 2})
    with pytest.raises(InfeasibleError) as error, loop.passes_explained(halves):
        raise InfeasibleError("no plan for 2 ranks fits", listed=True)
    assert str(error.value).startswith(
        "no plan for 2 ranks fits\nWith accumulate = 4 (now 2) a pass has 2 rows instead of 4."
    )
    whole = recipe.model_copy(update={"accumulate": 8})
    with pytest.raises(InfeasibleError, match=r"^no plan$"), loop.passes_explained(whole):
        raise InfeasibleError("no plan")


@pytest.mark.slow
def test_a_run_that_stays_bad_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        UsageError, match="step 2: the loss is nan, and there is no checkpoint to go back to yet"
    ):
        trained(monkeypatch, {2: NAN}, "rewinds=2")
    with pytest.raises(UsageError, match="step 5: the loss is nan; the run went back 1 time before"):
        trained(monkeypatch, {5: NAN, 7: NAN}, "rewinds=1", "out=twice")
    with pytest.raises(UsageError, match="spike: it has no effect without rewinds"):
        trained(monkeypatch, {}, "spike=5.0")


def test_a_run_ends_with_the_checkpoint_that_is_being_written(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    done = {"step": 0, "rows_seen": 0}
    run = Run(
        recipe,
        torch.device("cpu"),
        nn.Identity(),
        optimizer,
        RunStates("run", Retention()),
        iter([]),
        [],
        done,
    )
    losses, handle = iter([1.0, float("nan")]), MagicMock()
    often = recipe.checkpoints.model_copy(update={"interval": 1})
    monkeypatch.setattr(loop, "set_up", lambda recipe: run)
    monkeypatch.setattr(loop, "train_step", lambda run, batches: (next(losses), 1.0))
    monkeypatch.setattr(loop, "extremes", lambda values, group: [(value, value) for value in values])
    monkeypatch.setattr(run_states, "save_and_keep", lambda *args, **keywords: handle)
    with pytest.raises(UsageError, match="step 2: the loss is nan"):
        train(recipe.model_copy(update={"checkpoints": often}), MagicMock())
    handle.wait.assert_called_once_with()


def test_a_run_that_is_killed_goes_on_from_its_copies_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be, that is the question: " * 40)
    monkeypatch.setattr(run_states, "PeerCopies", partial(PeerCopies, memory=tmp_path))
    Path("own.py").write_text(MODEL)
    words = [
        "model=own.py:model",
        "steps=6",
        "data=text.txt",
        "sequence_length=8",
        "checkpoints.peer_copies=2",
        "plan.dp=1",
    ]

    def losses(out: str, killed: int = -1) -> dict[int, float]:
        log, told = MagicMock(), dict[int, float]()

        def step(number: int, loss: float, *_: Any) -> None:
            if number == killed:
                raise KeyboardInterrupt
            told[number] = loss

        log.step.side_effect = step
        train(read_recipe([*words, f"out={out}"]), log)
        return told

    whole = losses("whole")
    with pytest.raises(KeyboardInterrupt):
        losses("killed", 6)
    assert mw.latest("killed/checkpoints") is None
    # the copy of step 4 has all but two steps, and the checkpoint of the end has all
    assert losses("killed") == pytest.approx({step: whole[step] for step in (5, 6)})
    assert losses("killed") == {} and mw.latest("killed/checkpoints") is not None
