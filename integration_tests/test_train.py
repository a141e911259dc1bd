"""The main job, short: plans, trains, compares with one device, draws, and says how it went."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from commands import run_ranks

FIVE_E_MINUS_6 = 5e-6


def train(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_ranks(["train", "--json", "--out", str(folder), *arguments], launcher=False)


@pytest.mark.parametrize("model", ["gpt2", "bert", "vit"])
def test_four_ranks_train_as_one_device(tmp_path: Path, model: str) -> None:
    done = train(
        tmp_path,
        "--model",
        model,
        "--steps",
        "3",
        "--batch-size",
        "4",
        *([] if model == "vit" else ["--sequence-length", "32"]),
        "--dp",
        "2",
        "--tp",
        "2",
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] and result["world_size"] == 4
    assert result["degrees"]["dp"] == result["degrees"]["tp"] == 2
    assert len(result["steps"]) == 3
    assert result["worst_difference"] <= FIVE_E_MINUS_6
    assert result["parameters"] >= 5_000_000
    assert (tmp_path / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((tmp_path / "plan.json").read_text())["world_size"] == 4
    assert done.stderr.rstrip().splitlines()[-1].startswith("PASS: ")


def test_a_file_of_ones_own_and_a_plan_file(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 40)
    arguments = ("--text", str(text), "--steps", "2", "--batch-size", "2", "--sequence-length", "16")
    first = train(tmp_path / "a", *arguments, "--world-size", "2")
    assert first.returncode == 0, first.stderr
    again = train(
        tmp_path / "b", *arguments, "--world-size", "2", "--plan", str(tmp_path / "a" / "plan.json")
    )
    assert again.returncode == 0, again.stderr
    losses = [[step["parallel"] for step in json.loads(run.stdout)["steps"]] for run in (first, again)]
    assert losses[0] == losses[1]


def test_one_rank_is_exactly_one_device(tmp_path: Path) -> None:
    done = train(
        tmp_path, "--world-size", "1", "--steps", "2", "--batch-size", "2", "--sequence-length", "16"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worst_difference"] <= 1e-6
