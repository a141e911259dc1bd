"""Bad input ends in one clear line with the value, the rule and the fix, and in the right exit code: no traceback, no hang."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run_on, run_ranks

from meshwright.cli import main
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool

HERE = Path(__file__).parent
MODEL = f"{HERE / 'refusing.py'}:small_llama"

# arguments -> exit code, and what the one line must say: the value, and something of rule and fix
CASES: dict[str, tuple[list[str], int, list[str]]] = {
    "unknown planner": (
        ["plan", "--model", MODEL, "--planner", "eagr"],
        2,
        ["'eagr'", "did you mean 'eager'"],
    ),
    "unknown cluster": (["plan", "--model", MODEL, "--cluster", "dgx-h10"], 2, ["'dgx-h10'", "dgx-h100"]),
    "unknown optimizer": (["plan", "--model", MODEL, "--optimizer", "adamv"], 2, ["adamv", "adamw"]),
    "keys the model refuses": (
        ["plan", "--model", f"{HERE / 'refusing.py'}:wrong_keys", "--world-size", "2"],
        2,
        ["pixels", "Plain"],
    ),
    "no pair": (["plan", "--model", f"{HERE / 'refusing.py'}:no_pair"], 2, ["Plain", "(model, batch)"]),
    "raising factory": (
        ["plan", "--model", f"{HERE / 'refusing.py'}:raising"],
        2,
        ["KeyError", "the data set"],
    ),
    "no such function": (["plan", "--model", f"{HERE / 'refusing.py'}:nothing"], 2, ["'nothing'"]),
    "no such model": (["plan", "--model", "gpt3"], 2, ["gpt3", "gpt2"]),
    "no such axis": (["plan", "--model", MODEL, "--degree", "xp=2"], 2, ["'xp'", "dp", "tp"]),
    "no degree": (["plan", "--model", MODEL, "--degree", "tp"], 2, ["tp", "AXIS=N"]),
    "degrees beyond the world": (
        ["plan", "--model", MODEL, "--world-size", "4", "--degree", "tp=3"],
        2,
        ["tp=3", "4"],
    ),
    "too large": (
        ["plan", "--model", MODEL, "--world-size", "2", "--memory-limit", "10kB"],
        3,
        ["9.8 KiB", "rank", "Would fit:", "\n  - memory_limit="],
    ),
    "no size": (["plan", "--model", MODEL, "--memory-limit", "much"], 2, ["much", "16GB"]),
    "no plans": (["plan", "--model", MODEL, "--top-k", "0"], 2, ["top_k=0", ">= 1"]),
    "a world of nobody": (["plan", "--model", MODEL, "--world-size", "0"], 2, ["world_size=0", ">= 1"]),
    "no rate": (
        ["demo", "--world-size", "1", "--learning-rate", "0"],
        2,
        ["--learning-rate 0", "above 0"],
    ),
    "unknown command": (["tarin"], 2, ["'tarin'", "did you mean 'train'"]),
    "unknown option": (["demo", "--stepps", "3"], 2, ["--stepps", "--steps"]),
    "unknown architecture": (["demo", "--model", "gpt5"], 2, ["gpt5", "gpt2"]),
    "no ranks": (["demo", "--world-size", "0"], 2, ["0", "1.."]),
    "no steps": (["demo", "--world-size", "1", "--steps", "0"], 2, ["--steps 0", "larger"]),
    "no text": (
        ["demo", "--world-size", "1", "--text", "/does/not/exist"],
        2,
        ["/does/not/exist", "readable"],
    ),
    "no plan file": (["explain", "/does/not/exist.json"], 2, ["/does/not/exist.json"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_one_line_and_an_exit_code(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, words = CASES[case]
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    printed = capsys.readouterr()
    assert exit_.value.code == code, printed.err
    lines = printed.err.splitlines()
    # where nothing fits there is a line for each reason
    assert lines[0].startswith("Error: ") and (len(lines) == 1) == (code != 3), printed.err
    assert code != 3 or max(map(len, lines)) <= 100, printed.err
    for word in words:
        assert word in printed.err


def plan_for(degrees: dict[str, int], folder: Path) -> Path:
    world_size = 1
    for degree in degrees.values():
        world_size *= degree
    path = folder / "plan.json"
    names = {"dp": "data", "tp": "tensor"}
    strategies = {axis: names.get(axis, "tensor") for axis in degrees}
    plan = {"version": 1, "world_size": world_size, "degrees": degrees, "strategies": strategies}
    path.write_text(json.dumps(plan))
    return path


@pytest.mark.slow
def test_degrees_that_do_not_match_the_world_size(tmp_path: Path) -> None:
    plan = plan_for({"dp": 2, "tp": 2}, tmp_path)
    done = run_ranks(
        ["demo", "--world-size", "2", "--plan", str(plan), "--out", str(tmp_path)], launcher=False
    )
    assert done.returncode == 2, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "4" in lines[0] and "2" in lines[0], done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_an_axis_that_no_strategy_owns(rank_pool: RankPool, tmp_path: Path) -> None:
    plan = plan_for({"dp": 1, "xp": 2}, tmp_path)
    arguments = ["demo", "--world-size", "2", "--plan", str(plan), "--out", str(tmp_path)]
    with pytest.raises(PlanError, match="xp"):
        run_on(rank_pool, 2, arguments, tmp_path)


@pytest.mark.slow
def test_under_torchrun_one_rank_speaks_and_all_leave() -> None:
    done = run_ranks(["plan", "--model", MODEL, "--planner", "nobody"], launcher=True)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert len(lines) == 1 and "'nobody'" in lines[0], done.stderr
    assert "exitcode  : 2" in done.stderr  # torchrun's own report of what the ranks returned


@pytest.mark.slow
def test_the_world_size_of_a_job_is_not_to_be_contradicted() -> None:
    done = run_ranks(["demo", "--world-size", "3"], launcher=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("Error: ")]
    assert done.returncode != 0 and len(lines) == 1, done.stderr
    assert "--world-size 3" in lines[0] and "2 ranks" in lines[0]
