"""Imports, plans and reports draw nothing from the random numbers of the user's script."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

STATES = """
import importlib, pkgutil, random
import numpy as np
import torch

def states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

before = states()
import meshwright as mw
names = [f"meshwright{end}" for end in ("", "_dtensor", "_parallel", "_planner", "_pipeline", "_checkpoint")]
for name in names:
    for module in pkgutil.walk_packages(importlib.import_module(name).__path__, f"{name}."):
        if not module.name.endswith(("__main__", "testing.fixtures")):
            importlib.import_module(module.name)
            assert states() == before, module.name
"""

REPORTS = """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
before = states()
plan = mw.plan(model, torch.randn(8, 64, generator=torch.Generator()), world_size=2, cluster="laptop-cpu", dp=2)
for text in (plan.explain(), str(mw.explain(plan)), str(mw.profile(model, torch.ones(8, 64)))):
    assert text
    assert states() == before, text
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


@pytest.mark.slow
def test_imports_and_reports_leave_the_random_state() -> None:
    done = run(STATES + REPORTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_first_use_of_a_report_leaves_the_random_state() -> None:
    """Without the imports before it: a report must not be the first to import a module that draws."""
    done = run(STATES.partition("names =")[0] + REPORTS)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_the_comparison_sees_a_draw() -> None:
    """rich draws from `random` when it is first imported."""
    done = run(STATES.partition("import meshwright")[0] + "import rich.style\nassert states() == before")
    assert done.returncode == 1 and "AssertionError" in done.stderr
