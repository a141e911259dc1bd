"""The main job, short: plans, trains, compares with one device, draws, and says how it went."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import run_on, run_ranks

from meshwright_dtensor.testing.rank_pool import RankPool

FIVE_E_MINUS_6 = 5e-6
FOUR = ["--dp", "2", "--tp", "2", "--steps", "3", "--batch-size", "4"]


def check(result: Any, folder: Path) -> None:
    """Three steps on four ranks, a model of size, and the files of the run."""
    assert result["passed"] and result["world_size"] == 4
    assert result["degrees"]["dp"] == result["degrees"]["tp"] == 2
    assert len(result["steps"]) == 3
    assert result["worst_difference"] <= FIVE_E_MINUS_6
    assert result["parameters"] >= 5_000_000
    assert (folder / "losses.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "plan.json").read_text())["world_size"] == 4


@pytest.mark.slow
def test_four_ranks_train_as_one_device(tmp_path: Path) -> None:
    arguments = ["demo", "--json", "--out", str(tmp_path), "--model", "gpt2", "--sequence-length", "32"]
    done = run_ranks([*arguments, *FOUR], launcher=False)
    assert done.returncode == 0, done.stderr
    check(json.loads(done.stdout), tmp_path)
    assert done.stderr.rstrip().splitlines()[-1].startswith("PASS: ")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), [("bert", ["--sequence-length", "32"]), ("vit", [])])
def test_so_do_other_models(rank_pool: RankPool, tmp_path: Path, model: str, size: list[str]) -> None:
    arguments = ["demo", "--json", "--out", str(tmp_path), "--model", model, *size, *FOUR]
    done = run_on(rank_pool, 4, arguments, tmp_path)
    assert [rank.returncode for rank in done] == [0] * 4
    check(json.loads(done[0].stdout), tmp_path)
    assert done[0].stderr.rstrip().splitlines()[-1].startswith("PASS: ")


@pytest.mark.slow
def test_a_file_of_ones_own_and_a_plan_file(rank_pool: RankPool, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("to be, or not to be, that is the question. " * 40)
    losses = []
    for name, plan in (("a", []), ("b", ["--plan", str(tmp_path / "a" / "plan.json")])):
        arguments = ["demo", "--json", "--out", str(tmp_path / name), "--text", str(text), "--steps", "2"]
        arguments += ["--batch-size", "2", "--sequence-length", "16", "--world-size", "2", *plan]
        done = run_on(rank_pool, 2, arguments, tmp_path)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
        losses.append([step["parallel"] for step in json.loads(done[0].stdout)["steps"]])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_one_rank_is_exactly_one_device(tmp_path: Path) -> None:
    arguments = ["demo", "--json", "--out", str(tmp_path), "--world-size", "1", "--steps", "2"]
    done = run_ranks([*arguments, "--batch-size", "2", "--sequence-length", "16"], launcher=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["worst_difference"] <= 1e-6
