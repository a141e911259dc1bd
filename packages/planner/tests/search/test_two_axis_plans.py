"""Plans with two tensor axes: what the search makes of placements that are found on both at once."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from planner_models import DGX_H100, LAPTOP_CPU, DataLike, Mlp, TensorLike, Transformer, host_of, tokens
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.hints import mark_sharding
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import EagerPlanner, explain
from meshwright_planner.evaluation import evaluator
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement import solve as solve_module
from meshwright_planner.planners.eager import default_rules
from meshwright_planner.simulation.replay import simulate


class OuterLike(TensorLike):
    name: ClassVar[str] = "outer"
    axis: ClassVar[str] = "to"
    order: ClassVar[int] = 38
    optional: ClassVar[bool] = True

    def degrees(self, request: Any) -> Any:
        return super().degrees(request) if self.axis in request.pins else (1,)


HOST = host_of(DataLike, OuterLike, TensorLike)


def plans(model: nn.Module, batch: Any, world_size: int = 4, **options: Any) -> list[ParallelPlan]:
    """Those with two ranks along the outer axis."""
    pins = {"cluster": LAPTOP_CPU, "degrees": {"to": 2}, **options}
    return EagerPlanner(HOST).plan(model, batch, PlanRequest(world_size=world_size, **pins))


def placed(plan: ParallelPlan) -> dict[str, dict[str, str]]:
    return {rule.pattern: dict(rule.placement) for rule in plan.parameters}


BOTH = {"to": "S(0)", "tp": "S(0)"}


def test_weights_time_and_memory_are_divided_by_both_axes() -> None:
    model, batch = Mlp(), (torch.randn(8, 64),)
    (plan,) = plans(model, batch, tp=2)
    assert placed(plan) == {"up.weight": BOTH, "up.bias": BOTH, "down.weight": {"to": "S(1)", "tp": "S(1)"}}
    assert plan.predicted is not None and plan.predicted.split is not None
    assert set(plan.predicted.split.exposed) == {"to", "tp"}
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert plan.predicted.memory_bytes["parameters"] == (whole - 64 * 4) / 4 + 64 * 4
    report = str(explain(plan))
    assert "dp 1 x to 2 x tp 2" in report and "to forward: 1 x all_reduce" in report
    assert "tp forward: 1 x all_reduce" in report


def test_other_axes_are_searched_around_two_tensor_axes() -> None:
    candidate = plans(Transformer(layers=2), tokens(rows=4), 8, top_k=9)
    assert {plan.degree("tp") for plan in candidate} == {1, 2, 4}
    assert all(plan.degree("to") == 2 for plan in candidate)
    assert all({r.placement.get("to") for r in plan.parameters} - {None} for plan in candidate)


def test_the_slow_link_carries_less_than_the_fast_one() -> None:
    """Between nodes goes what the axis inside of them has already cut."""
    with torch.device("meta"):
        model = Transformer(layers=2, hidden=1024, heads=16)
    (plan,) = plans(model, tokens(1, 512), 16, cluster=DGX_H100, tp=8)
    moved = {
        axis: sum(c.nbytes * c.count for c in plan.collectives if c.axis == axis) for axis in ("to", "tp")
    }
    assert 0 < moved["to"] < moved["tp"]


def test_mark_sharding_names_its_own_axis() -> None:
    model, batch = Mlp(), (torch.randn(8, 64),)
    mark_sharding(model.up.weight, {"to": Shard(1)})
    (plan,) = plans(model, batch, tp=2)
    assert placed(plan)["up.weight"]["to"] == "S(1)" and placed(plan)["up.weight"]["tp"].startswith("S(")
    mark_sharding(model.up.weight, {"to": Replicate(), "tp": Replicate()})
    (plan,) = plans(model, batch, tp=2)
    assert "up.weight" not in placed(plan)
    # one axis alone is another problem than the other alone, though the ranks and the link are the same
    mark_sharding(model.up.weight, {"to": Shard(1), "tp": Shard(0)})
    outer, inner = (placed(plans(model, batch, 2, tp=tp, degrees={"to": 2 // tp})[0]) for tp in (1, 2))
    assert outer["up.weight"] == {"to": "S(1)"} and inner["up.weight"] == {"tp": "S(0)"}


def test_placements_of_one_axis_are_not_reused_for_the_other() -> None:
    """In one search, which keeps problems and placements: the same ranks, the same link, another axis."""
    model, request = Mlp(), PlanRequest(cluster=LAPTOP_CPU, world_size=2, degrees={"to": 2})
    mark_sharding(model.up.weight, {"to": Shard(1), "tp": Shard(0)})
    planner = EagerPlanner(HOST)
    search = Search(planner.setting(model, (torch.randn(8, 64),), request, HOST), default_rules())
    for axis, state in (("to", 1), ("tp", 0), ("to", 1)):
        for candidate in (search.evaluate({axis: 2}), search.estimate(search.point({axis: 2}))):
            assert candidate.searched == (axis,)
            assert candidate.placement.stored[candidate.problem.tape.parameters["up.weight"]] == state


@pytest.mark.slow
def test_memory_and_recomputation_count_on_both_axes() -> None:
    model, batch = Transformer(layers=2, hidden=32), tokens(rows=4)
    (free,) = plans(model, batch, tp=2)
    (again,) = plans(model, batch, tp=2, recompute="full")
    assert free.predicted is not None and again.predicted is not None
    assert again.predicted.memory_bytes["activations"] < free.predicted.memory_bytes["activations"]
    assert again.predicted.communication_seconds > free.predicted.communication_seconds
    (tight,) = plans(model, batch, tp=2, memory_limit=int(0.9 * free.predicted.total_bytes))
    assert tight.predicted is not None and tight.predicted.total_bytes < 0.9 * free.predicted.total_bytes
    with pytest.raises(InfeasibleError):
        plans(model, batch, tp=2, memory_limit=1000)


@pytest.mark.slow
def test_sequence_parallel_splits_along_one_of_two_axes() -> None:
    (plan,) = plans(Transformer(layers=2), tokens(rows=4), tp=2, sequence_parallel=True)
    (none,) = plans(Transformer(layers=2), tokens(rows=4), tp=2, sequence_parallel=False)
    assert plan.sequence_parallel and not none.sequence_parallel
    kinds = {c.kind for c in plan.collectives if c.module.startswith("layers.")}
    assert "reduce_scatter" in kinds or "all_gather" in kinds
    assert not {"reduce_scatter"} & {c.kind for c in none.collectives}


def test_note_on_placements_in_turns_gives_the_distance_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Mlp(), (torch.randn(8, 64),)
    (exact,) = plans(model, batch, tp=2)
    assert not any("in turns" in note for note in exact.provenance.notes)
    monkeypatch.setattr(solve_module, "EXACT", 0)
    (turns,) = plans(model, batch, tp=2)
    (note,) = [n for n in turns.provenance.notes if "in turns" in n]
    assert "placements on to and tp" in note and "% longer than the best" in note
    assert turns.parameters == exact.parameters


def test_plan_of_two_axes_is_replayed() -> None:
    (plan,) = plans(Transformer(layers=2), tokens(rows=4), 8, tp=2, dp=2)
    assert plan.predicted is not None
    replayed = simulate(plan, LAPTOP_CPU)
    assert math.isclose(replayed.sound_seconds, plan.predicted.step_seconds, rel_tol=0.1)


class FreeLike(TensorLike):
    name: ClassVar[str] = "free"
    axis: ClassVar[str] = "vp"
    order: ClassVar[int] = 39


def test_two_axes_are_searched_only_when_the_outer_one_is_pinned() -> None:
    host = host_of(DataLike, FreeLike, TensorLike)

    def degrees(**pins: Any) -> list[dict[str, int]]:
        request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, **pins)
        setting = EagerPlanner(host).setting(Mlp(), (torch.randn(8, 64),), request, host)
        return Search(setting, default_rules()).combinations()

    both = {"dp": 1, "vp": 2, "tp": 2}
    assert both not in degrees() and both not in degrees(tp=2)
    assert both in degrees(degrees={"vp": 2}) and both in degrees(tp=2, degrees={"vp": 2})


class Once(TensorLike):
    def degrees(self, request: Any) -> Any:
        return iter((1, 2, 4))


def test_degrees_of_an_iterator_are_all_named() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, tp=3)
    with pytest.raises(UsageError, match=r"allows 1, 2, 4; the nearest is tp=2"):
        EagerPlanner(host_of(DataLike, Once)).plan(Mlp(), (torch.randn(8, 64),), request)


def test_time_budget_holds_for_programs_of_two_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    real = evaluator.solve

    def solve(problem: Any, memory: Any, divided: Any, time_limit: float) -> Any:
        given.append(time_limit)
        return real(problem, memory, divided, time_limit)

    monkeypatch.setattr(evaluator, "solve", solve)
    batch = (torch.randn(8, 64),)
    plans(Mlp(), batch, tp=2, time_budget=0.001)
    assert given == [60.0]
    plans(Mlp(), batch, tp=2, time_budget=200.0)
    assert 60.0 < given[1] <= 200.0
    plans(Mlp(), batch, tp=2)
    assert given[2:] == [600.0]
