"""The integer program: the relaxation's answer where it is whole, the integer one's where it is not."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from meshwright_planner.placement import ilp as module
from meshwright_planner.placement.ilp import INFEASIBLE, Program


def _covering(edges: list[tuple[int, int]], cost: list[float]) -> Program:
    """Of each edge an end, at the least cost. On paths its relaxation is whole, on odd circles it is not."""
    program = Program()
    program.cost, program.integer, program.memory = list(cost), [1] * len(cost), [0.0] * len(cost)
    for first, other in edges:
        program.constrain([(first, 1.0), (other, 1.0)], 1.0, math.inf)
    return program


def _least(edges: list[tuple[int, int]], cost: list[float]) -> float:
    vectors = itertools.product((0, 1), repeat=len(cost))
    covers = (x for x in vectors if all(x[a] or x[b] for a, b in edges))
    return min(sum(c * first for c, first in zip(cost, x, strict=True)) for x in covers)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("closed", [False, True])
def test_optimum_with_integral_and_fractional_relaxation(
    seed: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    count = rng.choice([3, 5, 7])
    edges = [(n, n + 1) for n in range(count - 1)] + [(count - 1, 0)] * closed
    cost = [1.0 + (0.0 if closed else rng.random()) for _ in range(count)]
    integrality: list[bool] = []
    real = module.milp
    monkeypatch.setattr(
        module, "milp", lambda c, **k: integrality.append(any(k["integrality"])) or real(c, **k)
    )
    answer = _covering(edges, cost).solve(10.0)
    assert sorted({round(x, 6) for x in answer.x}) == [0.0, 1.0]
    assert sum(c * x for c, x in zip(cost, answer.x, strict=True)) == pytest.approx(_least(edges, cost))
    assert integrality == ([False, True] if closed else [False])  # half of each on an odd circle: asked again


def test_infeasible_relaxation_is_infeasible() -> None:
    program = _covering([(0, 1)], [1.0, 1.0])
    program.constrain([(0, 1.0), (1, 1.0)], 0.0, 0.5)
    assert program.solve(10.0).status == INFEASIBLE


def test_fractional_solution_is_rejected() -> None:
    """Negative control: the relaxation has one where whole numbers have none."""
    program = _covering([(0, 1), (1, 2), (2, 0)], [1.0, 1.0, 1.0])
    program.constrain([(0, 1.0), (1, 1.0), (2, 1.0)], 0.0, 1.5)
    assert program.solve(10.0).status == INFEASIBLE
