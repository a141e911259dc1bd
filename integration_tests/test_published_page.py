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


def test_tables_are_judged() -> None:
    rows = [
        {"published": 10.0, "predicted": 11.0, "error": 0.1, "fits": True},
        {"published": 20.0, "predicted": 10.0, "error": -0.5, "fits": False},
        {"published": None, "predicted": 5.0, "error": None, "fits": False},
    ]
    mean, order, right = judged(rows)
    assert (round(mean, 6), round(order, 6), right) == (0.3, -1.0, 2)
