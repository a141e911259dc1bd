"""What a long command shows of its work: on a terminal only."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import torch

def make():
    layers = (torch.nn.Linear(32, 32) for _ in range(4))
    return Mean(*layers), {"input": torch.randn(8, 32)}

class Mean(torch.nn.Sequential):
    def forward(self, input):
        return super().forward(input).square().mean()
"""


def planned(folder: Path, *more: str, terminal: bool = True) -> tuple[str, str]:
    """Stdout, and what stderr, which may be a terminal, has received."""
    (folder / "model.py").write_text(MODEL)
    command = [sys.executable, "-m", "meshwright", "plan", "--model", f"{folder / 'model.py'}:make"]
    shown, stderr = pty.openpty() if terminal else os.pipe()
    with subprocess.Popen(
        [*command, "--cluster", "dgx-h100", "--world-size", "8", *more],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    ) as process:
        os.close(stderr)
        received = b""
        # a terminal whose other end is closed is an error
        try:
            while part := os.read(shown, 4096):
                received += part
        except OSError:
            pass
        os.close(shown)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 0, received
    return out, received.decode()


@pytest.mark.slow
def test_planning_says_what_it_does_on_a_terminal(tmp_path: Path) -> None:
    out, shown = planned(tmp_path)
    assert "loading" in shown and "planning: " in shown and " tried" in shown
    assert len(out.splitlines()) <= 60 and "a step" in out.splitlines()[-1] and "planning: " not in out


@pytest.mark.slow
def test_data_and_files_have_no_progress(tmp_path: Path) -> None:
    assert planned(tmp_path, "--json")[1] == ""
    assert planned(tmp_path, terminal=False)[1] == ""
