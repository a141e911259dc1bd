"""Placements on two axes at once: random blocks against every combination, and against the axes one after the other.

MESHWRIGHT_RANDOM_BLOCKS=1000 tries as many; the suite tries 200.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from brute_force import FREE, problem_of
from brute_force_two_axes import joint_brute_force, joint_problem_of
from planner_models import Mlp
from test_ilp_optimal import BLOCKS, Block
from torch import nn

from meshwright_dtensor.sharding.intervals import segmented_shard
from meshwright_planner.cost.prices import JointCosts
from meshwright_planner.placement import solve as solve_module
from meshwright_planner.placement.ilp import Placement, Program, Unsolved
from meshwright_planner.placement.solve import in_turns, lower_bound, one_after_the_other, solve
from meshwright_planner.placement.two_axes import JointProblem
from meshwright_planner.trace.batch import Batch

MOST = 400
"""Combinations of one block that are tried."""


def drawn(seed: int, most: int = MOST) -> JointProblem:
    """A block with some of its options, at times drawn by lot."""
    dice = random.Random(seed)
    degrees = dice.choice([(2, 2), (2, 4), (4, 2)])
    batch = Batch.of(torch.randn(dice.choice([3, 5]), 8) if dice.random() < 0.5 else torch.randn(3, 8, 8))
    problem = joint_problem_of(Block(dice), batch, degrees)
    chosen = {k: options[:1] for k, options in problem.options.items()}  # replicated: there is an answer
    size = 1
    for v, value in enumerate(problem.tape.values):
        if (value.name or "").startswith("param:"):
            whole, *others = problem.storable(v, False)
            problem.kept[v] = [whole, *dice.sample(others, 2)]
            size *= 3
    for k in dice.sample(list(chosen), len(chosen)):
        room = min(len(problem.options[k]), most // size)
        if room > 1:
            chosen[k] = [chosen[k][0], *dice.sample(problem.options[k][1:], min(room, 6) - 1)]
            size *= len(chosen[k])
    problem.options = {
        k: [replace(o, seconds=dice.choice([0, 0.1, 1, 3]) * 1e-3 * dice.random()) for o in options]
        for k, options in chosen.items()
    }
    return problem


def seconds(placement: Placement) -> float:
    return placement.compute_seconds + placement.communication_seconds


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(BLOCKS))
def test_no_joint_placement_costs_less(seed: int) -> None:
    problem = drawn(seed)
    best, solved = joint_brute_force(problem), solve(problem, FREE)
    if best == float("inf"):
        assert solved is None
        return
    assert solved is not None and solved.status == "optimal" and solved.bound is None
    assert seconds(solved) == pytest.approx(best, rel=1e-4, abs=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(0, BLOCKS, 2))
def test_alternation_is_between_the_bound_and_sequential_axes(seed: int) -> None:
    problem = drawn(seed, most=4000)
    solved = solve(problem, FREE)
    singles = [one_after_the_other(problem, FREE, first=first) for first in (0, 1)]
    turns = in_turns(problem, FREE)
    if solved is None:
        assert turns is None and singles == [None, None]
        return
    slack = 1 + 2e-4
    assert lower_bound(problem) <= solved.objective * slack
    for single in singles:
        if single is not None:
            assert turns is not None and solved.objective <= turns.objective * slack
            assert turns.objective <= single.objective * slack


def test_joint_program_beats_sequential_axes() -> None:
    """The axis that comes first takes what is best for it alone, and leaves the other what is not."""
    better = 0
    for seed in range(12):
        problem = drawn(seed, most=4000)
        joint, single = solve(problem, FREE), one_after_the_other(problem, FREE)
        if joint is not None:
            better += single is None or seconds(joint) < 0.99 * seconds(single)
    assert better


def test_alternation_of_large_problems_has_a_bound() -> None:
    problem = joint_problem_of(Mlp(), Batch.of(torch.randn(3, 8, 64)))
    exact = solve(problem, FREE, problem.weights(), 60.0)
    turns = solve(problem, FREE, problem.weights(), 60.0, exact=0)
    assert exact is not None and exact.bound is None and exact.status == "optimal"
    assert turns is not None and turns.bound is not None and turns.status == "in turns"
    assert 0 < turns.bound <= exact.objective * (1 + 1e-4) <= turns.objective * (1 + 2e-4)
    # the order of Megatron on both axes: what each does not know of the other costs nothing here
    assert {turns.stored[v] for v in problem.weights()} == {(0, 0), (1, 1)}


def test_both_axes_shard_one_dim_only_if_it_divides() -> None:
    states = {inner: states_of(inner) for inner in (24, 20, 6)}
    assert (0, 0) in states[24] and (1, 0) in states[24]
    assert (0, 0) not in states[20] and (0, 1) in states[20] and (1, 0) in states[20]
    assert not any(0 in pair for pair in states[6] if pair[1] == 0)


def states_of(inner: int) -> set[Any]:
    """How the first weight of an MLP may be stored on 2 x 4 ranks."""
    problem = joint_problem_of(Mlp(64, inner), Batch.of(torch.randn(3, 8, 64)), (2, 4))
    return set(problem.storable(problem.tape.parameters["up.weight"], False))


class Fused(nn.Module):
    """q, k and v in one projection."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96, bias=False), nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (t.view(b, s, 8, 4).transpose(1, 2) for t in self.qkv(x).split(32, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, h))


def test_both_axes_shard_parts_of_a_fused_projection() -> None:
    problem = joint_problem_of(Fused(), Batch.of(torch.randn(3, 16, 32)))
    placement = solve(problem, FREE, divided=problem.weights())
    assert placement is not None
    outer, inner = placement.stored[problem.tape.parameters["qkv.weight"]]  # type: ignore[misc]
    assert outer == segmented_shard(0, (32, 32, 32), 2) and inner == segmented_shard(0, (16, 16, 16), 2)
    assert placement.stored[problem.tape.parameters["out.weight"]] == (1, 1)
    kinds = Counter((c.phase, c.collective.kind) for c in placement.conversions)
    assert kinds == {("forward", "all_reduce"): 2}  # the sum of the output, once on each axis


def in_vain(status: int, first: int, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Have the first so many programs end with this status and nothing; what time each gets."""
    real, limits = Program.solve, []

    def solved(program: Program, time_limit: float) -> Any:
        limits.append(time_limit)
        if len(limits) <= first:
            return SimpleNamespace(x=None, status=status, message="over")
        return real(program, time_limit)

    monkeypatch.setattr(Program, "solve", solved)
    return limits


def test_timeout_is_not_reported_as_infeasible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = joint_problem_of(Mlp(), Batch.of(torch.randn(3, 8, 64)))
    limits = in_vain(1, 1, monkeypatch)
    placement = solve(problem, FREE, divided=problem.weights(), time_limit=60.0)
    assert placement is not None and placement.status == "in turns" and placement.bound is not None
    assert len(limits) > 3 and limits[0] == 30.0 and max(limits) <= 60.0
    in_vain(1, 100, monkeypatch)
    with pytest.raises(Unsolved, match="the search for one is not finished"):
        solve(problem, FREE, time_limit=60.0)
    limits = in_vain(2, 100, monkeypatch)  # infeasible: nothing else is asked
    assert solve(problem, FREE, time_limit=60.0) is None and len(limits) == 1


def test_timeout_on_one_axis_is_not_reported_as_infeasible(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(Mlp(), Batch.of(torch.randn(3, 8, 64)))
    in_vain(1, 100, monkeypatch)
    with pytest.raises(Unsolved, match="no placement was found in 60 s"):
        solve(problem, FREE)


def test_all_programs_share_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A solver that takes all the time that it is given."""
    problem = joint_problem_of(Mlp(), Batch.of(torch.randn(3, 8, 64)))
    real, clock = Program.solve, [0.0]

    def solved(program: Program, time_limit: float) -> Any:
        clock[0] += time_limit
        return real(program, 60.0)

    monkeypatch.setattr(Program, "solve", solved)
    monkeypatch.setattr(solve_module, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    placement = solve(problem, FREE, problem.weights(), 100.0, exact=0)
    assert placement is not None and placement.status == "in turns" and clock[0] == pytest.approx(100.0)


def test_collectives_without_cost_are_in_the_solution(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cost model may say that collectives take no time: plans name them, as the runtime has them."""
    problem = joint_problem_of(Mlp(), Batch.of(torch.randn(3, 8, 64)))
    monkeypatch.setattr(JointCosts, "collective", lambda self, collective: 0.0)
    placement = solve(problem, FREE, divided=problem.weights())
    assert placement is not None and placement.communication_seconds == 0.0
    made = Counter((c.phase, c.collective.kind) for c in placement.conversions)
    forward = sum(count for (phase, _), count in made.items() if phase == "forward")
    assert forward >= 2 and all(c.consumers for c in placement.conversions), made
