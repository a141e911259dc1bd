"""Work that no machine changes has not grown: calls, programs, communication of a step, and what the planner searches."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import counts

from meshwright_dtensor.testing.rank_pool import RankPool


def test_no_count_has_grown(rank_pool: RankPool) -> None:
    lines = counts.grown(counts.measure(rank_pool), json.loads(counts.FILE.read_text()))
    assert not lines, f"{lines}; if that is meant: python benchmarks/counts.py --write"


@pytest.mark.parametrize(
    ("now", "reported"),
    [
        ({"tp2: calls": 1020, "tp2: bytes": 64}, []),
        ({"tp2: calls": 900, "tp2: bytes": 32}, []),
        ({"tp2: calls": 1021, "tp2: bytes": 64}, ["tp2: calls: 1021, and 1000 in the file (+2% is allowed)"]),
        ({"tp2: calls": 1000, "tp2: bytes": 65}, ["tp2: bytes: 65, and 64 in the file (+0% is allowed)"]),
        ({"tp2: calls": 1000}, ["tp2: bytes: in the file only"]),
        (
            {"tp2: calls": 1000, "tp2: bytes": 64, "tp2: programs": 1},
            ["tp2: programs: in this run only"],
        ),
    ],
)
def test_a_count_that_grows_is_reported(now: dict[str, int], reported: list[str]) -> None:
    assert counts.grown(now, {"tp2: calls": 1000, "tp2: bytes": 64}) == reported
