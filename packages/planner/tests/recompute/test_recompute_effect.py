"""The effect of recompute on time and saved bytes, policy by policy and stage by stage."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

import pytest
from planner_models import LAPTOP_CPU, TensorLike, Transformer, eager, host_of, tokens

from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.plan import ParallelPlan, RecomputeRule, StageTime
from meshwright_dtensor.strategy import (
    Link,
    ModuleWork,
    Peak,
    PlanRequest,
    SearchRequest,
    Strategy,
    StrategyCost,
)
from meshwright_planner import EagerPlanner, explain
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import allowing
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import default_rules
from meshwright_planner.recompute.rules import in_words, rules_of
from meshwright_planner.reports.why_not import _has
from meshwright_planner.search.optimality import prove

CLUSTER = LAPTOP_CPU


def planned(recompute: str | None, limit: int | None = None) -> ParallelPlan:
    model, batch = Transformer(layers=4, hidden=128), tokens(rows=16)
    request = PlanRequest(cluster=CLUSTER, world_size=1, recompute=recompute, memory_limit=limit)
    return eager().plan(model, batch, request)[0]


def time(plan: ParallelPlan) -> StageTime:
    assert plan.predicted is not None and plan.predicted.split is not None
    (stage,) = plan.predicted.split.stages
    assert stage.forward_seconds + stage.backward_seconds == pytest.approx(plan.predicted.compute_seconds)
    return stage


def test_recompute_adds_to_the_backward_pass() -> None:
    free, again = time(planned(None)), time(planned("full"))
    # products take twice as long, attention 2.5 times, and memory-bound operations by the bytes that they move
    assert free.backward_seconds == pytest.approx(2 * free.forward_seconds, rel=0.02)
    assert again.forward_seconds == pytest.approx(free.forward_seconds)
    # all of a layer but the product that it ends with, of which autograd keeps the inputs
    assert 2.55 * again.forward_seconds < again.backward_seconds < 2.7 * again.forward_seconds


@pytest.mark.slow
def test_policies_trade_time_for_memory() -> None:
    """Each keeps less than the one before, and takes longer; the first that fits is taken."""
    plans = [planned(policy) for policy in (None, "selective", "alternate", "full")]
    predictions = [plan.predicted for plan in plans]
    seconds = [p.compute_seconds for p in predictions if p is not None]
    held = [p.total_bytes for p in predictions if p is not None]
    assert seconds == sorted(set(seconds)) and held == sorted(set(held), reverse=True)
    for plan, size in zip(plans, held, strict=True):
        assert planned(None, allowing(size)).recompute == plan.recompute
    with pytest.raises(InfeasibleError):
        planned(None, held[-1] // 2)


STAGES = [["embed", "layers.0", "layers.1"], ["layers.2", "layers.3", "norm", "head"]]


class Halves(Strategy):
    """Two stages that hold all there is alike; the first layers run again first, and in full where that is not enough."""

    name: ClassVar[str] = "halves"
    axis: ClassVar[str] = "pp"
    divides: ClassVar[bool] = True
    optional: ClassVar[bool] = True
    chosen: ClassVar[str] = "{}"

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [1, 2]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        whole, kept = (
            sum(getattr(w, part) for w in request.pipeline.work) for part in ("seconds", "saved_bytes")
        )
        work, chosen = list(request.pipeline.work), dict[str, str]()
        order = [(f"layers.{n}", policy) for policy in ("selective", "full") for n in range(4)]
        while (
            request.pipeline.recompute_variants
            and order
            and _held(request.pipeline.work) - _held(work) < request.pipeline.bytes_to_free
        ):
            name, policy = order.pop(0)
            chosen[self.chosen.format(name)] = policy
            for place, again in enumerate(request.pipeline.recompute_variants[policy]):
                if again.module.startswith(name):
                    work[place] = again
        return StrategyCost(
            compute=sum(w.seconds for w in work) / whole,
            activations=sum(w.saved_bytes for w in work) / kept,
            peak=Peak(1.0, max(w.transient_bytes for w in work)),
            stages=(0.5, 0.5),
            recompute=chosen,
            fields={"pipeline": {"stages": STAGES, "microbatches": 1, "schedule": "1f1b"}},
        )


def _held(work: Iterable[ModuleWork]) -> float:
    modules = list(work)
    return sum(w.saved_bytes for w in modules) + max(w.transient_bytes for w in modules)


class Parts(Halves):
    """One that would run a part of a block again."""

    chosen: ClassVar[str] = "{}.mlp"


def divided(
    limit: int | None, recompute: str | None = None, strategy: type[Strategy] = Halves
) -> ParallelPlan:
    request = PlanRequest(cluster=CLUSTER, world_size=2, recompute=recompute, memory_limit=limit)
    model, batch = Transformer(layers=4, hidden=128), tokens(rows=16)
    return EagerPlanner(host_of(strategy)).plan(model, batch, request)[0]


@pytest.mark.slow
def test_stages_recompute_as_much_as_the_memory_requires() -> None:
    free, full = divided(None).predicted, divided(None, "full").predicted
    assert free is not None and full is not None and not divided(None).recompute
    counts = []
    for part in (0.999, 0.9, 0.8, 0.7):
        limit = allowing(int(part * free.total_bytes))
        plan = divided(limit)
        again = [n for n in range(4) if any(rule.matches(f"layers.{n}") for rule in plan.recompute)]
        assert again == list(range(len(again))) and plan.predicted is not None
        assert free.step_seconds < plan.predicted.step_seconds <= full.step_seconds * (1 + 1e-9)
        assert allowing(plan.predicted.total_bytes) <= limit
        counts.append(len(again))
    assert counts[0] == 3 and counts == sorted(counts) and counts[-1] == 4
    tight = divided(allowing(int(0.999 * free.total_bytes)))
    assert tight.recompute == (RecomputeRule(pattern="layers.[0-2]", policy="selective"),)
    text = str(explain(tight))
    assert "recompute selective in part" in text
    assert "recomputed: stage 0: 2 selective of 3 modules; stage 1: 1 selective of 4 modules" in text
    assert not _has(tight, "recompute", "selective") and _has(tight, "recompute", "layers.[0-2]")


@pytest.mark.slow
def test_stage_choice_counts_in_the_proof() -> None:
    """Where nobody let stages choose, the best that is left is as fast as that would be."""
    free = divided(None).predicted
    assert free is not None
    limit = allowing(int(0.999 * free.total_bytes))
    chosen = divided(limit).predicted
    assert chosen is not None and chosen.proof is not None and chosen.proof.startswith("exact")
    planner = EagerPlanner(host_of(Halves))
    setting = planner.setting(
        Transformer(layers=4, hidden=128),
        tokens(rows=16),
        PlanRequest(cluster=CLUSTER, world_size=2, memory_limit=limit),
        host_of(Halves),
    )
    search = Search(setting, default_rules())
    (degrees,) = search.combinations()
    points = [Point.of(degrees, 0, {}, policy) for policy in (None, "selective", "alternate", "full")]
    estimates = {point: search.estimate(point) for point in points}
    proof = prove(search, [search.evaluate(points[1])], [degrees], estimates)
    assert proof.least == pytest.approx(chosen.step_seconds) and proof.words.startswith("bounded")


@pytest.mark.slow
def test_recomputing_every_block_by_stage_costs_the_same_as_the_policy() -> None:
    """Where every stage recomputes everything, time and memory are those of the policy for the whole model."""
    full = divided(None, "full")
    assert full.predicted is not None
    tight = divided(allowing(full.predicted.total_bytes))
    assert tight.predicted is not None and tight.recompute == full.recompute
    assert tight.predicted.step_seconds == pytest.approx(full.predicted.step_seconds)


@pytest.mark.slow
def test_pinned_recompute_has_no_stage_choice() -> None:
    free = divided(None).predicted
    assert free is not None
    limit = allowing(int(0.95 * free.total_bytes))
    assert divided(limit, "full").recompute == (RecomputeRule(pattern="layers.*"),)
    assert divided(limit, "layers.[12]").recompute == (RecomputeRule(pattern="layers.[12]"),)
    with pytest.raises(InfeasibleError):
        divided(limit, "layers.3")


def test_part_of_a_block_is_refused() -> None:
    """Nobody knows what they would cost: what holds for all blocks is taken."""
    free = divided(None).predicted
    assert free is not None
    plan = divided(allowing(int(0.95 * free.total_bytes)), strategy=Parts)
    assert plan.recompute == (RecomputeRule(pattern="layers.*", policy="selective"),)


def test_rules_match_exactly_the_chosen_blocks() -> None:
    blocks = [f"model.layers.{n}" for n in range(126)] + [f"encoder.{n}.block" for n in range(12)]
    policies = dict.fromkeys(blocks[:30], "full") | {blocks[n]: "selective" for n in (40, 42, 99, 127, 137)}
    rules = rules_of(policies, blocks, ["model.layers.*"])

    def policy_of(name: str) -> str | None:
        return next((rule.policy for rule in rules if rule.matches(name)), None)

    names = [*blocks, *(f"{name}.mlp" for name in blocks), "model", "model.layers"]
    assert {name: policy_of(name) for name in names} == {name: policies.get(name) for name in names}
    assert [rule.pattern for rule in rules if rule.policy == "full"] == [
        "model.layers.[0-9]",
        "model.layers.1[0-9]",
        "model.layers.2[0-9]",
    ]
    assert in_words(rules) == "selective and full in part"
    assert rules_of(dict.fromkeys(blocks, "full"), blocks, ["a.*", "b.*"]) == (
        RecomputeRule(pattern="a.*"),
        RecomputeRule(pattern="b.*"),
    )


def test_request_cannot_name_the_stage_choice() -> None:
    with pytest.raises(
        UsageError, match=r"recompute='by stage' is not 'full'.*no module of this Transformer"
    ):
        planned("by stage")
    with pytest.raises(UsageError, match=r"recompute='by stage' is not 'full'"):
        divided(None, "by stage")


def test_a_rank_of_a_divided_model_pays_for_its_part_of_the_collectives() -> None:
    """Of a strategy that does not say how many its ranks run; one that says so is taken at its word."""

    def sent(strategy: type[Strategy] | None) -> float:
        host = host_of(*((strategy,) if strategy else ()), TensorLike)
        stages = 2 if strategy else 1
        request = PlanRequest(cluster=CLUSTER, world_size=2 * stages, pp=stages if strategy else None, tp=2)
        model, batch = Transformer(layers=4, hidden=128), tokens(rows=16)
        predicted = EagerPlanner(host).plan(model, batch, request)[0].predicted
        assert predicted is not None and predicted.split is not None
        return predicted.split.exposed["tp"]

    whole = sent(None)
    assert sent(HalfTheCompute) == pytest.approx(whole / 2)
    assert sent(HalfTheComputeAllCollectives) == pytest.approx(whole)


class HalfTheCompute(Halves):
    """Waits as long as it computes."""

    factors: ClassVar[dict[str, float]] = {}

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return replace(super().cost(request, degree, link), compute=1.0, idle=0.5, **self.factors)  # type: ignore[arg-type]


class HalfTheComputeAllCollectives(HalfTheCompute):
    factors: ClassVar[dict[str, float]] = {"communication": 1.0}
