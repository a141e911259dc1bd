"""What a rank does does not grow with the number of ranks: counted calls on fake process groups."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import scale
from step_work import counted_calls

SAME = 1.02
"""Calls that depend on memory addresses and the order of sets."""


def calls(world: int) -> dict[str, float]:
    with counted_calls() as count:
        parts = scale.measure(world, lambda: count[0])
    return {name: number for name, number in parts.items() if name not in scale.MEMORY}


def test_no_part_of_a_run_makes_more_calls_in_a_world_of_thousands() -> None:
    # imports, and all that is kept from one world to the next: of shapes of the same world more would be
    calls(128)
    few, many = calls(64), calls(4096)
    assert {name: many[name] / few[name] for name in few} == {
        name: pytest.approx(1, abs=SAME - 1) for name in few
    }
    assert few["parallelize"] > 1000 and few["save planning"] > 1000
