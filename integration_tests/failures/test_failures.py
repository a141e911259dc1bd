"""A few of the jobs of `python -m integration_tests.failures`, and one that does not fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from .jobs import CAUSES, run_job, write_plans


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_plans(tmp_path_factory.mktemp("plans"), ("dp", "pp"))


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "kind"), [("dp", "early return"), ("pp", "backward"), ("dp", "SIGSTOP")])
def test_a_job_ends_soon_and_names_rank_and_cause(plans: dict[str, Path], plan: str, kind: str) -> None:
    ended = run_job(plan, plans[plan], kind)
    # how soon is for the command
    faults = [fault for fault in ended.faults if not fault.startswith("ended after")]
    assert not faults, ended.screen


@pytest.mark.slow
def test_a_job_without_a_failure_is_told_apart(plans: dict[str, Path]) -> None:
    ended = run_job("dp", plans["dp"], "none")
    assert ended.code == 0 and "exit code 0" in ended.faults and "none" not in CAUSES
