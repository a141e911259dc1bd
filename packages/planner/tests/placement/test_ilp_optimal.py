"""The integer program's placements are the best there are: random blocks, against every combination.

MESHWRIGHT_RANDOM_BLOCKS=1000 tries as many; the suite tries 200.
"""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch
from brute_force import FREE, brute_force, bytes_of, every_cost, problem_of
from torch import nn

from meshwright_dtensor.sharding.states import is_shard
from meshwright_planner.placement.ilp import MemoryTerms
from meshwright_planner.placement.ilp_build import Build
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.placement.solve import solve
from meshwright_planner.trace.batch import Batch

BLOCKS = int(os.environ.get("MESHWRIGHT_RANDOM_BLOCKS", "200"))
MOST = 400
"""Combinations of one block that are tried."""


class Block(nn.Module):
    """Two linear layers, and between and after them operations drawn by lot."""

    def __init__(self, dice: random.Random) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8, bias=False)
        self.b = nn.Linear(8, 8, bias=False)
        self.shape = dice.choice(["chain", "parallel", "residual", "gate", "square"])
        self.act = dice.choice([torch.relu, torch.tanh, torch.neg, torch.exp])
        self.twice = dice.random() < 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if self.shape == "chain":
            out = self.b(self.act(h))
        elif self.shape == "parallel":
            out = h + self.b(x)
        elif self.shape == "residual":
            out = self.b(h) + h
        elif self.shape == "gate":
            out = self.act(h) * self.b(x)
        else:
            out = self.b(h @ h.transpose(-1, -2) @ x)
        return out.square().sum() if self.twice else out.sum()


def problem_by_lot(dice: random.Random) -> PlacementProblem:
    """A block by lot, with some of its options at times by lot."""
    degree = dice.choice([2, 4])
    batch = Batch.of(torch.randn(dice.choice([3, 5]), 8) if dice.random() < 0.5 else torch.randn(3, 8, 8))
    problem = problem_of(Block(dice), batch, degree)
    chosen = {k: options[:1] for k, options in problem.options.items()}  # replicated: there is an answer
    size = 9
    for k in dice.sample(list(chosen), len(chosen)):
        room = min(len(problem.options[k]), MOST // size)
        if room > 1:
            chosen[k] = [chosen[k][0], *dice.sample(problem.options[k][1:], min(room, 5) - 1)]
            size *= len(chosen[k])
    # times between nothing and what a large collective takes, so that now one and now the other decides
    problem.options = {
        k: [replace(o, seconds=dice.choice([0, 0.1, 1, 3]) * 1e-3 * dice.random()) for o in options]
        for k, options in chosen.items()
    }
    return problem


@pytest.mark.parametrize("seed", range(BLOCKS))
def test_no_placement_costs_less(seed: int) -> None:
    problem = problem_by_lot(random.Random(seed))
    best = brute_force(problem)
    solved = solve(problem, FREE)
    if best == float("inf"):
        assert solved is None
        return
    assert solved is not None
    assert solved.compute_seconds + solved.communication_seconds == pytest.approx(best, rel=1e-4, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BLOCKS))
def test_no_placement_costs_less_where_memory_counts(seed: int) -> None:
    """Bytes with a price, a limit between what is least and what is most, and weights that are to be divided."""
    dice = random.Random(seed)
    problem = problem_by_lot(dice)
    divided = frozenset(v for v in problem.weights() if dice.random() < 0.3)
    memory = MemoryTerms(dice.choice([0.0, 1e-9, 1e-8, 1e-7]), dice.choice([2.0, 4.0]))
    used = sorted({b for _, b in every_cost(problem, replace(memory, limit=math.inf), divided)})
    if used and dice.random() < 0.7:  # half a byte off, so that nobody asks whether as much is too much
        memory = replace(memory, limit=dice.choice(used) + dice.choice([0.5, 0.5, -0.5]))
    best = brute_force(problem, memory, divided)
    solved = solve(problem, memory, divided=divided)
    if best == math.inf:
        assert solved is None
        return
    assert solved is not None
    taken = bytes_of(problem, solved.options, solved.stored, memory)
    assert memory.limit is None or taken <= memory.limit
    assert all(is_shard(solved.stored[v]) for v in divided)
    cost = solved.compute_seconds + solved.communication_seconds + memory.price * taken
    assert cost == pytest.approx(best, rel=1e-4, abs=1e-8)


def test_step_of_a_single_consumer_has_no_variable() -> None:
    """Its price is on the edges; what several consumers may share is a variable of its own."""
    several = 0
    for seed in range(10):
        build = Build(problem_by_lot(random.Random(seed)), FREE, frozenset())
        for event in build.events:
            shared = len({(user.node, user.position) for user in event.users}) > 1
            several += shared
            assert (event.column is not None) == shared
            seconds = sum(build.costs.collective(m.collective) for m in event.step.moves) * event.count
            if event.column is not None:
                assert build.program.cost[event.column] == seconds
            else:
                assert all(build.program.cost[user.edge] >= seconds for user in event.users)
    assert several
