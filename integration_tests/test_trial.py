"""Plans tried on real ranks: measured, the fastest kept, and said so in the plan."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from commands import HERE

import meshwright as mw
from meshwright.cli import State, group
from meshwright_dtensor.errors import UsageError


@pytest.mark.slow
def test_trial_of_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    sizes = ["--batch-size", "4", "--sequence-length", "16", "--world-size", "2"]
    command = [
        sys.executable,
        "-m",
        "meshwright",
        "plan",
        "--model",
        f"{HERE}/refusing.py:small_llama",
        *sizes,
        "--trial",
        "2",
        "-o",
        str(output),
    ]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    plan = mw.ParallelPlan.load(output)
    assert plan == mw.ParallelPlan.from_dict(json.loads(done.stdout))
    (note,) = [n for n in plan.provenance.notes if n.startswith("tried: ")]
    assert re.search(r"tried: [0-9.]+ ms a step .* number 1 of 2 measured", note)


LARGE = """
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(256, 256)  # 256 KiB: without values in a model that is only planned for

    def forward(self, x):
        return self.layer(x).pow(2).mean()


def make():
    return Model(), {"x": torch.randn(8, 256)}
"""


def planned(folder: Path, monkeypatch: pytest.MonkeyPatch, *options: str) -> str:
    """What `meshwright plan` prints for the large model; its ranks are processes, and the command runs here."""
    (folder / "large_model.py").write_text(LARGE)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "large_model", raising=False)
    # where the ranks find its class too
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    arguments = ["plan", "--model", "large_model:make", "--world-size", "2", *options]
    with redirect_stdout(io.StringIO()) as out:
        code = group.main(arguments, "meshwright", standalone_mode=False, obj=State(tuple(arguments)))
    assert not code
    return out.getvalue()


@pytest.mark.slow
def test_the_planner_that_tries_has_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = mw.ParallelPlan.from_dict(
        json.loads(planned(tmp_path, monkeypatch, "--planner", "trial", "--json"))
    )
    assert plan.provenance.planner == "trial"
    assert any(note.startswith("tried: ") for note in plan.provenance.notes)
    assert plan.provenance.measured_seconds


@pytest.mark.slow
def test_a_comparison_shows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = planned(tmp_path, monkeypatch, "--compare", "trial")
    assert "measured" in shown and "the order is by predicted time" in shown


def test_trial_needs_values() -> None:
    with torch.device("meta"):
        model = torch.nn.Linear(4, 4)
    with pytest.raises(UsageError, match="no values"):
        mw.plan(model, torch.ones(2, 4), planner="trial", world_size=2)
