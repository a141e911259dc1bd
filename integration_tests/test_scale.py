"""What a rank does does not grow with the number of ranks: counted calls on fake process groups."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import scale

SAME = 1.02
"""Calls that depend on memory addresses and the order of sets."""


@contextmanager
def counted() -> Iterator[list[int]]:
    """Calls of functions so far, of Python and of C, in the one entry of a list."""
    count = [0]

    def seen(frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_call"):
            count[0] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        yield count
    finally:
        sys.setprofile(before)


def calls(world: int) -> dict[str, float]:
    with counted() as count:
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
