"""`meshwright verify`: every loss, gradient, parameter and optimizer state against one device, and exit code 4."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import HERE, run_on, run_ranks

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.rank_pool import RankPool

LAYOUT = [
    "--world-size",
    "4",
    "--degree",
    "dp=2",
    "--degree",
    "tp=2",
    "--steps",
    "3",
    "--tolerance",
    "1e-5",
    "--json",
]


SIZE = ["--batch-size", "4", "--sequence-length", "16"]


def check(report: Any, states: set[str], no_measure: set[tuple[str, bool]]) -> None:
    """Everything is there and right; `states`: of the optimizer; `no_measure`: kinds that are not held to a tolerance."""
    assert report["ok"] and report["steps"] == 3 and report["degrees"]["dp"] == report["degrees"]["tp"] == 2
    entries = report["comparisons"]
    gradients = {entry["name"] for entry in entries if entry["kind"] == "gradient"}
    parameters = {entry["name"] for entry in entries if entry["kind"] == "parameter"}
    assert gradients == parameters and len(gradients) > 10
    assert {entry["name"].rpartition("/")[2] for entry in entries if entry["kind"] == "state"} == states
    assert all(entry["tolerance"] <= 1e-5 for entry in entries)
    assert {(entry["kind"], entry["step"] < 0) for entry in entries if not entry["measured"]} == no_measure


@pytest.mark.slow
def test_three_steps_are_those_of_one_device(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = ["verify", "--model", "gpt2", "--optimizer", "adamw", *LAYOUT, *SIZE]
    done, *_ = run_on(rank_pool, 4, arguments, tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    check(json.loads(done.stdout), {"exp_avg", "exp_avg_sq", "step"}, {("parameter", False)})


@pytest.mark.slow
def test_with_momentum_every_parameter_is_measured(rank_pool: RankPool, tmp_path: Path) -> None:
    arguments = ["verify", "--model", f"{HERE}/refusing.py:small_llama", "--optimizer", "sgd-momentum"]
    first, *others = run_on(rank_pool, 4, [*arguments, *LAYOUT, *SIZE], tmp_path)
    assert first.returncode == 0, first.stdout[-2000:]
    check(json.loads(first.stdout), {"momentum_buffer"}, set())
    assert all(other.returncode == 0 and not other.stdout for other in others)


@pytest.mark.slow
def test_a_model_that_is_not_the_same_everywhere_is_caught(rank_pool: RankPool, tmp_path: Path) -> None:
    model = f"{HERE}/refusing.py:rankish"
    arguments = ["verify", "--model", model, "--world-size", "2", "--degree", "tp=2", "--json"]
    done = run_on(rank_pool, 2, arguments, tmp_path)
    assert [rank.returncode for rank in done] == [4, 4]
    report = json.loads(done[0].stdout)
    assert not report["ok"] and report["failures"] > 0


@pytest.mark.slow
def test_a_model_without_its_loss_is_told_in_terms_of_the_command_line(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    arguments = ["verify", "--model", f"{HERE}/refusing.py:lossless", "--world-size", "2", "--tp", "2"]
    with pytest.raises(UsageError, match="the model returned a dict without a loss") as error:
        run_on(rank_pool, 2, arguments, tmp_path)
    assert "let --model file.py:function return a module that computes its loss" in str(error.value)
    assert "lambda" not in str(error.value)


@pytest.mark.slow
def test_what_differs_is_said_before_anyone_leaves() -> None:
    arguments = ["verify", "--model", "refusing.py:slow_to_say", "--world-size", "2", "--tp", "2"]
    done = run_ranks(arguments, launcher=False)
    assert done.returncode == 4 and "DIFFERENT" in done.stdout, done.stdout + done.stderr
