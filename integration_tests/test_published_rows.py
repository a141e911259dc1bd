"""Rows of the published tables: throughput within 10%, and what ran out of memory does not fit."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from planner_published import predict
from published_rows import A100, LLAMA, QWEN, Row, Table


@pytest.mark.parametrize(("table", "place"), [(LLAMA, 0), (A100, 0), (QWEN, 0)], ids=["h100", "a100", "qwen"])
def test_a_published_throughput(table: Table, place: int) -> None:
    made = predict(table, table.rows[place])
    assert abs(made["error"]) < 0.1 and made["fits"]


@pytest.mark.parametrize("row", [row for row in QWEN.rows if row.published is None], ids=lambda row: row.name)
def test_what_ran_out_of_memory_does_not_fit(row: Row) -> None:
    assert not predict(QWEN, row)["fits"]
