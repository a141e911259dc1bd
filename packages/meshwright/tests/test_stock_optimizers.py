"""Optimizers of commands that step: plans know more names, which trials replace and `verify` refuses before it plans."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright import cli, trial
from meshwright.stock_optimizers import OPTIMIZERS
from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.cost.optimizers import NAMES, STRUCTURES

PLAN = ParallelPlan.from_dict({"world_size": 2, "degrees": {"dp": 2}})


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    with pytest.raises(SystemExit) as exit_:
        cli.main(arguments)
    printed = capsys.readouterr()
    return exit_.value.code, printed.out + printed.err


@pytest.mark.parametrize("optimizer", NAMES)
def test_plans_for_any_optimizer_are_tried(monkeypatch: pytest.MonkeyPatch, optimizer: str) -> None:
    commands: list[Sequence[str]] = []

    def run(command: Sequence[str], **how: Any) -> Any:
        commands.append(command)
        Path(command[command.index("--output") + 1]).write_text(json.dumps({"seconds": [0.1]}))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(subprocess, "run", run)
    (plan,) = trial.tried([PLAN], ["--saved", "x"], optimizer)
    (command,) = commands
    stepped = command[command.index("--optimizer") + 1]
    assert stepped == (optimizer if optimizer in OPTIMIZERS else "adamw")
    (note,) = plan.provenance.notes
    assert (f"steps were those of adamw, since trials do not know {optimizer}" in note) == (
        optimizer in STRUCTURES
    )


@pytest.mark.parametrize("optimizer", ["muon", "adamw8bit", "adamv"])
def test_verify_and_trial_refuse_what_they_cannot_step_with(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, optimizer: str, tmp_path: Path
) -> None:
    monkeypatch.setattr("meshwright.ranks.launch", lambda *_: pytest.fail("ranks were started"))
    PLAN.save(tmp_path / "plan.json")
    for command in (["verify"], ["trial", str(tmp_path / "plan.json")]):
        code, text = said(capsys, *command, "--model", "gpt2", "--optimizer", optimizer)
        assert code == 2 and f"{command[0]} steps with {', '.join(OPTIMIZERS)}" in text


def test_help_lists_what_a_command_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for command, names in (("plan", NAMES), ("verify", OPTIMIZERS), ("trial", OPTIMIZERS)):
        text = " ".join(said(capsys, command, "--help")[1].split())
        listed = text.partition("--optimizer TEXT ")[2].partition(" [default")[0].rstrip(".")
        assert set(listed.replace(" or ", ", ").split(", ")) == set(names)
    assert "[default: what the optimizer needs]" in " ".join(said(capsys, "plan", "--help")[1].split())
