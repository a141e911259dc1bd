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
    for one, other in edges:
        program.constrain([(one, 1.0), (other, 1.0)], 1.0, math.inf)
    return program


def _least(edges: list[tuple[int, int]], cost: list[float]) -> float:
    every = itertools.product((0, 1), repeat=len(cost))
    covers = (x for x in every if all(x[a] or x[b] for a, b in edges))
    return min(sum(c * one for c, one in zip(cost, x, strict=True)) for x in covers)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("closed", [False, True])
def test_it_is_the_least_whether_the_relaxation_is_whole_or_not(
    seed: int, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    count = rng.choice([3, 5, 7])
    edges = [(n, n + 1) for n in range(count - 1)] + [(count - 1, 0)] * closed
    cost = [1.0 + (0.0 if closed else rng.random()) for _ in range(count)]
    asked: list[bool] = []
    real = module.milp
    monkeypatch.setattr(module, "milp", lambda c, **k: asked.append(any(k["integrality"])) or real(c, **k))
    answer = _covering(edges, cost).solve(10.0)
    assert sorted({round(x, 6) for x in answer.x}) == [0.0, 1.0]
    assert sum(c * x for c, x in zip(cost, answer.x, strict=True)) == pytest.approx(_least(edges, cost))
    assert asked == ([False, True] if closed else [False])  # half of each on an odd circle: asked again


def test_what_has_no_answer_relaxed_has_none() -> None:
    program = _covering([(0, 1)], [1.0, 1.0])
    program.constrain([(0, 1.0), (1, 1.0)], 0.0, 0.5)
    assert program.solve(10.0).status == INFEASIBLE


def test_halves_that_fit_are_no_answer() -> None:
    """Negative control: the relaxation has one where whole numbers have none."""
    program = _covering([(0, 1), (1, 2), (2, 0)], [1.0, 1.0, 1.0])
    program.constrain([(0, 1.0), (1, 1.0), (2, 1.0)], 0.0, 1.5)
    assert program.solve(10.0).status == INFEASIBLE
