"""The log of a run: plain lines, records that a resumed run goes on with, nothing on other ranks; and what ends a run."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.ranks import signals
from meshwright.recipes.recipe_input import read_recipe
from meshwright.runs.stragglers import Straggler
from meshwright.training.log import Log
from meshwright_dtensor.plan import ParallelPlan


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with a text."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("to be, or not to be")


def log_of(*words: str, active: bool = True, as_json: bool = False) -> Log:
    tensorboard = "metrics.tensorboard=false"
    return Log(
        read_recipe(["model.model_type=gpt2", "data=text.txt", "out=run", tensorboard, *words]),
        active,
        as_json,
    )


def run(log: Log, first: int, last: int) -> None:
    model: Any = torch.nn.Linear(2, 2)
    model.parallel_plan = ParallelPlan(world_size=2, degrees={"dp": 2}, strategies={"dp": "data"})
    log.begin(model, first)
    for step in range(first + 1, last + 1):
        log.step(step, 5.0 - step, 1.0, 1e-3, [{"input_ids": torch.zeros(2, 8)}], 0.5, 2**20)
    log.close()


def steps() -> list[int]:
    return [json.loads(line)["step"] for line in Path("run/metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_replaces_what_was_lost(capsys: pytest.CaptureFixture[str]) -> None:
    run(log_of("steps=9"), 0, 7)
    with open("run/metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')
    run(log_of("steps=9"), 4, 9)
    assert steps() == list(range(1, 10))
    printed = capsys.readouterr().out
    assert "from step 4 to 9" in printed and "step 7/9  loss -2.0000  norm 1  32 tokens/s  1.0 MiB" in printed
    assert json.loads(Path("run/recipe.json").read_text())["steps"] == 9


def test_the_interval_and_the_last_step() -> None:
    run(log_of("steps=7", "metrics.interval=3"), 0, 7)
    assert steps() == [3, 6, 7]


def test_json_is_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of("steps=2", as_json=True)
    run(log, 0, 2)
    log.evaluated(2, 3.5)
    log.end(2, 0)
    printed = capsys.readouterr()
    data = json.loads(printed.out)
    assert data["loss"] == 3.0 and data["evaluation_loss"] == 3.5 and data["signal"] == 0
    assert printed.err.rstrip().endswith("done: 2 steps, in run")


def test_other_ranks_write_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    log = log_of("steps=2", active=False)
    run(log, 0, 2)
    log.end(2, 15)
    assert capsys.readouterr().out == "" and not Path("run").exists()


def test_signals_are_kept_and_a_rank_without_its_launcher_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with signals() as received:
        monkeypatch.setattr("os.getppid", lambda: 1)
        # the shell of a run that nobody launched may end
        assert received() == 0
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        assert received() == signal.SIGTERM
        os.kill(os.getpid(), signal.SIGINT)
        assert received() == signal.SIGINT
    assert signal.getsignal(signal.SIGTERM) is before


def test_records_tell_the_share_of_the_peak_and_what_the_plan_predicts() -> None:
    model: Any = torch.nn.Linear(2, 2)
    plan = ParallelPlan(world_size=2, degrees={"dp": 2}, strategies={"dp": "data"})
    predicted = {"step_seconds": 2.0, "communication_seconds": 0.5, "split": {"bubble_seconds": 0.25}}
    model.parallel_plan = ParallelPlan.from_json(
        json.dumps(
            json.loads(plan.to_json()) | {"predicted": predicted, "provenance": {"cluster": "dgx-h100"}}
        )
    )
    log = log_of("steps=1", "precision=bf16")
    log.begin(model, 0, flops=1e12)
    log.step(1, 4.0, 1.0, 1e-3, [{"input_ids": torch.zeros(2, 8)}], 0.5, 2**20)
    log.close()
    record = json.loads(Path("run/metrics.jsonl").read_text())
    # one rank: 989.4 TFLOP/s in bfloat16
    assert record["mfu"] == pytest.approx(2e12 / 989e12)
    assert (record["predicted_bubble"], record["predicted_communication"]) == (0.125, 0.25)


def test_a_model_that_cannot_be_profiled_has_no_share() -> None:
    run(log_of("steps=1"), 0, 1)
    assert "mfu" not in json.loads(Path("run/metrics.jsonl").read_text())


def test_a_change_of_slow_ranks_is_a_record() -> None:
    log = log_of("steps=2")
    run(log, 0, 2)
    slow = Straggler(1, "node-1", 3.0, 1.0)
    for step, ranks in enumerate([[], [slow], [slow], []]):
        log.slow_ranks(step, ranks)
    records = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    told = {record["step"]: record["slow_ranks"] for record in records if "slow_ranks" in record}
    assert told == {1: [{"rank": 1, "host": "node-1", "seconds": 3.0, "median": 1.0}], 3: []}
