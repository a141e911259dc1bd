"""Expert parallelism on real ranks: losses, gradients and steps equal those of one device, and only tokens are sent."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from moe_models import (
    EXPERTS,
    Container,
    Fused,
    Masked,
    Mixture,
    Problems,
    differences,
    full,
    mixture,
    plan_for,
    tokens,
)
from torch import nn

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ExpertsRule, ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import clip_grad_norm_, parallelize
from meshwright_parallel.moe import dispatch

KINDS: dict[str, type[nn.Module]] = {"fused": Fused, "container": Container, "masked": Masked}


def steps(
    rank: int, world_size: int, kind: str, degrees: dict[str, int], same: bool = False, top: int = 2
) -> dict[str, Any]:
    """Four AdamW steps with clipping, compared with one device; batches divide over all axes, some of them or none."""
    single = mixture(KINDS[kind], top)
    model = copy.deepcopy(single)
    parallelize(model, plan_for(model, degrees))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, single)]
    wrong: Problems = []
    for step, rows in enumerate((4, 3, 6, 8)):
        batch = tokens(rows, seed=step, same=same)
        with communication() as log:
            loss = model(**batch).loss
            loss.backward()
        expected = single(**batch).loss
        expected.backward()
        if abs(float(full(loss)) - float(expected.detach())) > 1e-6:
            wrong.append((f"loss {step}", abs(float(full(loss)) - float(expected.detach()))))
        wrong += differences(model, single, "gradient")
        norms = [
            clip_grad_norm_(model.parameters(), 0.05),
            nn.utils.clip_grad_norm_(single.parameters(), 0.05),
        ]
        if abs(float(norms[0]) - float(norms[1])) > 1e-5 * float(norms[1]):
            wrong.append(("norm", float(norms[0])))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wrong += differences(model, single, "value", 1e-4)  # Adam divides small gradients by themselves
    held = sum(p.to_local().numel() for n, p in model.named_parameters() if ".experts." in n)
    whole = sum(p.numel() for n, p in single.named_parameters() if ".experts." in n)
    events = [(e.kind, e.axis, e.module, e.nbytes, e.why) for e in log.events]
    return {"wrong": wrong, "share": held / whole, "events": events}


@pytest.mark.slow
@pytest.mark.parametrize("same", [False, True], ids=["spread", "idle-ranks"])
@pytest.mark.parametrize(
    ("kind", "degrees"),
    [
        ("fused", {"ep": 2}),
        ("fused", {"ep": 4}),
        ("fused", {"dp": 2, "ep": 2}),
        ("container", {"ep": 2}),
        ("container", {"dp": 2, "ep": 2}),
        ("masked", {"ep": 2}),
    ],
)
def test_training_equals_one_device(
    rank_pool: RankPool, kind: str, degrees: dict[str, int], same: bool
) -> None:
    world = degrees.get("dp", 1) * degrees["ep"]
    for result in rank_pool.run(world, steps, kind, degrees, same):
        assert not result["wrong"]
        assert result["share"] == 1 / degrees["ep"]
        events = result["events"]
        counts = "which experts have rows"  # E integers, to agree on the gradients of a container
        kinds = {k for k, _, module, _, why in events if ".experts" in module and why != counts}
        assert kinds == {"all_to_all"}, "only tokens are sent, no weights of experts"
        sizes = {nbytes for kind, *_, nbytes, why in events if kind == "all_to_all" and "tokens" in why}
        assert (sizes and all(nbytes > 0 for nbytes in sizes)) or same


def modes(rank: int, world_size: int) -> dict[str, Any]:
    """Eval, no_grad, frozen experts, frozen all but experts."""
    single = mixture()
    model = copy.deepcopy(single)
    parallelize(model, plan_for(model, {"ep": world_size}))
    batch = tokens()
    results: dict[str, Any] = {}
    for mode in ("eval", "train"):
        getattr(model, mode)(), getattr(single, mode)()
        with torch.no_grad():
            results[mode] = float((full(model(**batch).logits) - single(**batch).logits).abs().max())
    for name, trained in (("frozen", False), ("alone", True)):
        for m in (model, single):
            for key, p in m.named_parameters():
                p.requires_grad_((".experts." in key) == trained)
                p.grad = None
        for m in (model, single):
            m(**tokens(same=True)).loss.backward()
        results[name] = differences(model, single, "gradient")
    return results


def test_evaluation_and_frozen_parts(rank_pool: RankPool) -> None:
    for results in rank_pool.run(2, modes):
        assert results["eval"] <= 1e-6 and results["train"] <= 1e-6
        assert not results["frozen"] and not results["alone"]


def accumulated(rank: int, world_size: int) -> Problems:
    """Two backward passes before a step, and a copy of the parallel model."""
    single = mixture(Container)
    first = copy.deepcopy(single)
    parallelize(first, plan_for(first, {"ep": world_size}))
    model = copy.deepcopy(first)
    for seed in (0, 1):
        for m in (model, single):
            m(**tokens(seed=seed, same=seed == 0)).loss.backward()
    untouched = [(n, 1.0) for n, p in first.named_parameters() if p.grad is not None]
    return differences(model, single, "gradient") + untouched


def test_gradients_accumulate_and_copies_are_independent(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, accumulated):
        assert not wrong


def spoilt(rank: int, world_size: int) -> Problems:
    """The comparison of these tests, with a dispatch that returns results to the wrong rows."""
    single = mixture()
    model = copy.deepcopy(single)
    parallelize(model, plan_for(model, {"ep": world_size}))
    kept = dispatch.Rows.combined
    try:
        dispatch.Rows.combined = lambda self, results, n: kept(self, results.flip(0), n)  # type: ignore[method-assign]
        for m in (model, single):
            m(**tokens()).loss.backward()
    finally:
        dispatch.Rows.combined = kept  # type: ignore[method-assign]
    return differences(model, single, "gradient")


def test_comparison_detects_a_wrong_combination(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, spoilt):
        assert len(wrong) > 5


def refused(rank: int, world_size: int, plan: str, dense: bool) -> tuple[str, str]:
    model: nn.Module = nn.Sequential(nn.Linear(4, 4)) if dense else Mixture()
    with pytest.raises(PlanError) as caught:
        parallelize(model, ParallelPlan.from_json(plan))
    return caught.value.field, str(caught.value)


@pytest.mark.slow
def test_impossible_plans_are_refused(rank_pool: RankPool) -> None:
    base = plan_for(Mixture(), {"ep": 2})
    three = base.replace(degrees={"ep": 3}, world_size=3)
    with pytest.raises(PlanError, match="divide"):
        three.validate_for(3)
    for field, text in rank_pool.run(3, refused, three.replace(experts=()).to_json(), False):
        assert field == "degrees.ep" and "equally many experts" in text and "nearest legal: 2" in text
    for field, text in rank_pool.run(
        2, refused, ParallelPlan(world_size=2, degrees={"ep": 2}).to_json(), True
    ):
        assert field == "degrees.ep" and "any module of experts" in text
    rule = ExpertsRule(module="nowhere", count=EXPERTS)
    for _, text in rank_pool.run(2, refused, base.replace(experts=(rule,)).to_json(), False):
        assert "no module" in text
