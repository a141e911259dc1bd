"""docs/planner-published.md has the figures of the stored results, and those are of the rows that the benchmark has."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from published_page import NAMES, PAGE, RESULTS, judged, with_figures
from published_rows import TABLES


def test_the_page_has_the_stored_figures() -> None:
    results, page = json.loads(RESULTS.read_text()), PAGE.read_text()
    assert with_figures(page, results) == page
    results["meta"][0]["predicted"] *= 2
    assert with_figures(page, results) != page


def test_the_stored_results_are_of_the_rows() -> None:
    results = json.loads(RESULTS.read_text())
    assert list(TABLES) == list(NAMES)
    for key, table in TABLES.items():
        rows = [(row["row"], row["published"]) for row in results[key]]
        assert rows == [(row.name, row.published) for row in table.rows]


def test_microbatches_of_gpts_are_those_of_the_script() -> None:
    rows = TABLES["megatron"].rows
    steps = [
        (row.rows * row.accumulated // row.plan["dp"], row.plan.get("microbatches", row.accumulated))
        for row in rows
    ]
    assert [held // count for held, count in steps] == [16, 16, 16, 8, 4, 2, 2, 1, 1, 1]
    assert all(held % count == 0 for held, count in steps)
    assert [row.late_sums for row in rows] == [row.scattered for row in rows] == [False] * 4 + [True] * 6


def test_tables_are_judged() -> None:
    rows = [
        {"published": 10.0, "predicted": 11.0, "error": 0.1, "fits": True},
        {"published": 20.0, "predicted": 10.0, "error": -0.5, "fits": False},
        {"published": None, "predicted": 5.0, "error": None, "fits": False},
    ]
    mean, order, right = judged(rows)
    assert (round(mean, 6), round(order, 6), right) == (0.3, -1.0, 2)
