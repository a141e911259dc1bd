"""The worse a rank or a link is, the longer a step takes: over random plans, ranks and factors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_replay import BUCKET, pipelined, plan_of, simulate
from test_replay_invariants import random_cases

from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.simulation.faults import LinkFault, Straggler

ABOVE = 1 - 1e-12
"""Sums of the same seconds in another order."""


def shared(stage: int, microbatches: int = 1) -> list[dict[str, Any]]:
    often = microbatches if stage == 3 else 1
    gather = {"axis": "zero", "kind": "all_gather", "nbytes": 40 * BUCKET, "phase": "forward"}
    return [
        {**gather, "count": 4 * often},
        {**gather, "nbytes": 90 * BUCKET, "count": often, "why": "parameters outside of blocks"},
        *([{**gather, "phase": "backward", "count": 3 * often}] if stage == 3 else []),
        {**gather, "kind": "reduce_scatter", "phase": "backward", "count": 5},
    ]


SUMS = {"axis": "dp", "kind": "all_reduce", "nbytes": 20 * BUCKET, "count": 6, "phase": "backward"}
INSIDE = {"axis": "tp", "kind": "all_reduce", "nbytes": 10 * BUCKET, "count": 8}
MESSAGES = [
    {"axis": "pp", "kind": "send_recv", "nbytes": BUCKET, "phase": phase, "count": 4}
    for phase in ("forward", "backward")
]
TIMES = [(0.01, 0.02)] * 2
PLANS: list[ParallelPlan] = [
    plan_of({"dp": 16}, 0.03, collectives=[SUMS]),
    plan_of({"dp": 2, "zero": 8}, 0.03, collectives=[*shared(3), SUMS], zero={"stage": 3}),
    plan_of({"zero": 4, "tp": 4}, 0.03, collectives=[*shared(1), INSIDE], split={"exposed": {"tp": 0.01}}, zero={"stage": 1}),
    pipelined(4, 8, TIMES * 2, degrees={"dp": 4}, collectives=[*MESSAGES, SUMS]),
    pipelined(
        2, 4, TIMES, degrees={"dp": 2, "zero": 4}, collectives=[*MESSAGES, *shared(3, 4), SUMS], zero={"stage": 3}
    ),
    pipelined(2, 4, TIMES, degrees={"zero": 8}, collectives=[*MESSAGES, *shared(2)], schedule="split", zero={"stage": 2}),
]  # fmt: skip


@random_cases
@given(
    st.sampled_from(PLANS),
    st.integers(0, 15),
    st.lists(st.floats(1.0, 4.0), min_size=2, max_size=2).map(sorted),
    st.one_of(st.none(), st.tuples(st.integers(0, 15), st.floats(1.0, 3.0))),
)
def test_a_slower_rank_makes_no_step_shorter(
    plan: ParallelPlan, rank: int, slower: list[float], other: tuple[int, float] | None
) -> None:
    others = [] if other is None else [Straggler(*other)]
    sound = simulate(plan, DGX_H100, stragglers=others).seconds
    less, more = (simulate(plan, DGX_H100, stragglers=[*others, Straggler(rank, s)]).seconds for s in slower)
    assert sound * ABOVE <= less and less * ABOVE <= more


@random_cases
@given(
    st.sampled_from(PLANS),
    st.integers(0, 15),
    st.sampled_from([level.name for level in DGX_H100.links]),
    st.lists(st.floats(0.02, 1.0), min_size=2, max_size=2).map(sorted),
)
def test_a_weaker_link_makes_no_step_shorter(
    plan: ParallelPlan, rank: int, level: str, shares: list[float]
) -> None:
    sound = simulate(plan, DGX_H100).seconds
    more, less = (simulate(plan, DGX_H100, link_faults=[LinkFault(rank, level, s)]).seconds for s in shares)
    assert sound * ABOVE <= less and less * ABOVE <= more


@pytest.mark.parametrize("plan", PLANS, ids=range(len(PLANS)))
def test_a_step_is_as_long_as_a_rank_that_is_much_slower_takes(plan: ParallelPlan) -> None:
    """So that a factor counts in full, not only in the right direction."""
    assert plan.predicted is not None
    least = 10 * plan.predicted.compute_seconds
    assert simulate(plan, DGX_H100, stragglers=[Straggler(3, 10.0)]).seconds >= least
