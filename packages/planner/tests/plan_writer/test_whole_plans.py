"""Whole plans: placements that are known to be right, what equal requests give, what explain says of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from planner_models import LAPTOP_CPU, Mlp, Transformer, best, eager, tokens
from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import explain
from meshwright_planner.plan_writer.notes import comparison


def state(plan: ParallelPlan, name: str, axis: str = "tp") -> Any:
    return plan.parameter_states(name)[axis]


def test_mlp_is_column_then_row() -> None:
    plan = best(Mlp(), torch.randn(4, 16, 64), world_size=2, tp=2)
    assert [state(plan, n) for n in ("up.weight", "up.bias", "down.weight")] == [0, 0, 1]
    forward = [c for c in plan.collectives if c.phase == "forward"]
    assert [(c.kind, c.nbytes, c.count) for c in forward] == [("all_reduce", 4 * 16 * 64 * 4, 1)]


def test_block_is_megatrons() -> None:
    plan = best(Transformer(vocab=8192), tokens(vocab=8192), world_size=4, tp=4)
    for layer in range(3):
        for name in ("attention.q", "attention.k", "attention.v", "mlp.up"):
            assert state(plan, f"layers.{layer}.{name}.weight") == 0
        for name in ("attention.o", "mlp.down"):
            assert state(plan, f"layers.{layer}.{name}.weight") == 1
        assert state(plan, f"layers.{layer}.norm1.weight") == "I"
    assert state(plan, "head.weight") == 0  # the loss reads its shards of the vocabulary
    assert any(c.why == "inside cross_entropy" for c in plan.collectives)


def test_q_k_v_share_one_collective() -> None:
    plan = best(Transformer(layers=3), tokens(rows=1, length=64), world_size=4, tp=4)
    into = [c for c in plan.collectives if c.module == "layers.*.attention.q"]
    assert sum(c.count for c in into if c.phase == "backward") == 3  # one a layer, not three
    assert not any(c.module in ("layers.*.attention.k", "layers.*.attention.v") for c in plan.collectives)


def test_tied_embedding_is_vocabulary_parallel() -> None:
    plan = best(Transformer(tied=True, vocab=4096), tokens(vocab=4096), world_size=2, tp=2)
    assert state(plan, "embed.weight") == state(plan, "head.weight") == 0


def test_odd_sizes_stay_replicated() -> None:
    model = nn.Sequential(nn.Linear(63, 65), nn.ReLU(), nn.Linear(65, 31))
    plan = best(model, torch.randn(5, 63), world_size=2, tp=2)
    assert plan.parameters == ()
    even = best(
        nn.Sequential(nn.Linear(63, 64), nn.ReLU(), nn.Linear(64, 31)), torch.randn(5, 63), world_size=2, tp=2
    )
    assert [state(even, "0.weight"), state(even, "2.weight")] == [0, 1]


def test_repeated_blocks_are_written_once() -> None:
    plan = best(Transformer(layers=12), tokens(), world_size=2, tp=2)
    patterns = [rule.pattern for rule in plan.parameters]
    assert "layers.*.attention.q.weight" in patterns and len(patterns) == 9
    assert all("layers.0." not in rule.module for rule in plan.activations)


def test_blocks_that_differ_are_not_merged() -> None:
    model = Transformer(layers=4)
    model.layers[2].mlp = Mlp(64, 129)  # the inner size does not divide, the outer does
    plan = best(model, tokens(), world_size=2, tp=2)
    assert [state(plan, f"layers.{i}.mlp.up.weight") for i in range(4)] == [0, 0, 1, 0]


def test_one_rank_is_trivial() -> None:
    plan = best(Transformer(), tokens())
    assert plan.world_size == 1 and plan.parameters == plan.activations == plan.collectives == ()
    assert plan.predicted is not None and plan.predicted.memory_bytes["parameters"] > 0


def test_equal_requests_give_equal_plans_and_json_round_trips() -> None:
    first, second = (best(Transformer(), tokens(), world_size=4, tp=2) for _ in range(2))
    assert first == second and first.to_json() == second.to_json()
    assert ParallelPlan.from_json(first.to_json()) == first
    assert first != best(Transformer(layers=2), tokens(), world_size=4, tp=2)


def test_explain_shows_candidates_and_reason() -> None:
    plans = eager().plan(
        Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=3)
    )
    text = str(explain(plans))
    for word in (
        "dp",
        "tp",
        "step",
        "compute",
        "exposed comm",
        "optimizer",
        "memory",
        "bound by",
        "faster than",
    ):
        assert word in text
    assert "also considered" in str(explain(plans[0])) and str(explain([])) == "no plans\n"


def costs(name: str, compute: float, exposed: float, bubble: float) -> Any:
    """What a comparison reads of a candidate, in seconds."""
    return SimpleNamespace(
        name=name,
        compute_seconds=compute,
        exposed_seconds=exposed,
        bubble_seconds=bubble,
        optimizer_seconds=0.1,
        step_seconds=compute + exposed + bubble + 0.1,
        excess_bytes=0,
    )


def test_a_comparison_names_every_part_that_matters_with_its_sign() -> None:
    """The parts add up to the difference, where one part alone is more than all of it."""
    better, other = costs("pp 2", 1.0, 0.2, 0.6), costs("dp 2", 2.0, 0.3001, 0.0)
    text = comparison(better, other)
    assert text == (
        "20.8% faster than dp 2: 1 s less compute and 100 ms less exposed communication, but 600 ms more bubble"
    )
    assert comparison(costs("a", 1.0, 0.0, 0.0), costs("b", 1.1, 0.001, 0.0)).endswith(" less compute")
