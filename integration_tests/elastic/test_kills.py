"""A few of the kills of `python -m integration_tests.elastic`."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kills import losses, spread, torture


@pytest.mark.slow
def test_a_run_that_is_killed_goes_on_by_itself(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        folder.mkdir()
    assert torture(whole, 0, seed=0) == 0
    # soon after each start: a quick machine would come to the end before the last one
    assert torture(killed, 4, seed=2, longest=1.5) == 4
    assert losses(killed) == pytest.approx(losses(whole), rel=1e-4)
    assert spread(killed) < 1e-4 and spread(whole) == 0.0
