"""Experts on local tokens, on real ranks: where rows are sharded and experts are not, no token is communicated."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from moe_models import (
    EXPERTS,
    Container,
    Dropping,
    Fused,
    Masked,
    Mixing,
    Problems,
    Sequences,
    differences,
    full,
    mixture,
    plan_for,
    tokens,
)
from torch import nn

from meshwright_dtensor.comm.log import CommEvent, communication
from meshwright_dtensor.plan import ExpertsRule, ParallelPlan, RecomputeRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.api import parallelize as parallelize_module
from meshwright_parallel.moe import detect
from meshwright_parallel.moe.probe import Rejected

KINDS: dict[str, type[nn.Module]] = {
    "fused": Fused,
    "container": Container,
    "masked": Masked,
    "sequences": Sequences,
    "mixing": Mixing,
    "dropping": Dropping,
}
DP: dict[str, Any] = {"degrees": {"dp": 2}}
ZERO: dict[str, Any] = {"degrees": {"zero": 2}, "zero": {"stage": 3}}
HYBRID: dict[str, Any] = {"degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 2}}
TP: dict[str, Any] = {
    "degrees": {"dp": 2, "tp": 2},
    "parameters": [
        {"pattern": "*.experts.up", "placement": {"tp": "S(2)"}},
        {"pattern": "*.experts.up_bias", "placement": {"tp": "S(1)"}},
        {"pattern": "*.experts.down", "placement": {"tp": "S(1)"}},
    ],
}


def plan(fields: dict[str, Any], **more: Any) -> ParallelPlan:
    world = 1
    for degree in fields["degrees"].values():
        world *= degree
    return ParallelPlan(world_size=world, **fields, **more)


def unbalanced(rows: int) -> dict[str, torch.Tensor]:
    """A batch whose first half is one repeated token, so that most experts are idle on the first rank."""
    batch = tokens(rows, seed=rows)
    batch["ids"][: rows // 2] = 7
    return batch


def token_collectives(events: list[CommEvent]) -> set[tuple[str, str, str]]:
    """Collectives of experts on data axes, and all others there but all-reduces and those of parameters."""
    return {
        (e.axis, e.kind, e.function)
        for e in events
        if e.axis not in ("tp", "ep")
        and e.function not in ("data", "zero")
        and (".experts" in e.module or e.kind != "all_reduce")
        and e.why != "which experts have rows"
    }


def steps(rank: int, world_size: int, kind: str, fields: dict[str, Any], top: int = 2) -> dict[str, Any]:
    """Three AdamW steps, of batches that divide over all axes or not, compared with one device."""
    single = mixture(KINDS[kind], top)
    model = copy.deepcopy(single)
    shared = plan_for(model, {"ep": 2}) if "ep" in fields["degrees"] else None
    more = {} if shared is None else {"experts": shared.experts, "parameters": shared.parameters}
    parallelize(model, plan(fields, **more))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, single)]
    wrong: Problems = []
    collectives: set[tuple[str, str, str]] = set()
    for step, batch in enumerate((tokens(3), tokens(4, same=True), unbalanced(8))):
        scores = single.blocks[0].router(single.norm(single.embed(batch["ids"])))
        chosen = [set(half.argmax(-1).flatten().tolist()) for half in scores.chunk(2)]
        losses, collectives = [], set()
        for m in (model, single):
            torch.manual_seed(step)
            with communication() as log:
                loss = m(**batch).loss
                loss.backward()
            losses.append(float(full(loss)))
            collectives |= token_collectives(log.events)  # one device has none
        if abs(losses[0] - losses[1]) > 1e-6:
            wrong.append((f"loss {step}", abs(losses[0] - losses[1])))
        wrong += differences(model, single, "gradient")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    wrong += differences(model, single, "value", 1e-4)  # Adam divides small gradients by themselves
    return {"wrong": wrong, "collectives": collectives, "chosen": chosen}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "fields", "top"),
    [
        ("fused", DP, 2),
        ("container", DP, 1),
        ("masked", DP, 2),
        ("sequences", DP, 2),
        ("container", ZERO, 1),
        ("container", {"degrees": {"zero": 2, "ep": 2}, "zero": {"stage": 3}}, 1),
        ("fused", HYBRID, 2),
        ("fused", TP, 2),
    ],
    ids=[
        "fused-dp",
        "container-dp",
        "masked-dp",
        "sequences-dp",
        "container-zero3",
        "container-zero3-ep",
        "fused-dp-zero2",
        "fused-dp-tp",
    ],
)
def test_training_equals_one_device_without_token_collectives(
    rank_pool: RankPool, kind: str, fields: dict[str, Any], top: int
) -> None:
    for result in rank_pool.run(plan(fields).world_size, steps, kind, fields, top):
        assert not result["wrong"]
        assert not result["collectives"]
        first, second = result["chosen"]
        assert second - first, "some experts have tokens of one rank only"


def rejecting(rank: int, world_size: int) -> dict[str, Any]:
    kept = detect.probe
    try:
        detect.probe = lambda candidate: Rejected("for this test")  # type: ignore[assignment]
        return steps(rank, world_size, "fused", DP)
    finally:
        detect.probe = kept


@pytest.mark.slow
def test_rejected_experts_are_gathered_and_right(rank_pool: RankPool) -> None:
    for result in rank_pool.run(2, rejecting):
        assert not result["wrong"] and result["collectives"]
    for kind in ("mixing", "dropping"):
        for result in rank_pool.run(2, steps, kind, DP):
            assert not result["wrong"] and result["collectives"]


def without_probe(rank: int, world_size: int) -> Problems:
    """Experts whose rows depend on each other, run on local tokens although the probe rejects them."""
    original = parallelize_module.local_token_modules
    rule = ExpertsRule(module="blocks.*.experts", count=EXPERTS)
    try:
        parallelize_module.local_token_modules = lambda *_: {f"blocks.{b}.experts": rule for b in (0, 1)}
        return steps(rank, world_size, "mixing", DP)["wrong"]  # type: ignore[no-any-return]
    finally:
        parallelize_module.local_token_modules = original


def test_comparison_detects_rows_that_interact(rank_pool: RankPool) -> None:
    for wrong in rank_pool.run(2, without_probe):
        assert len(wrong) > 5


def used(rank: int, world_size: int, fields: dict[str, Any]) -> list[Any]:
    """Evaluation, recomputation of experts, of a module that holds them and of a part, and a copy of the model."""
    problems: list[Any] = []
    for pattern in ("blocks.*", "blocks.*.experts", "blocks.*.experts.*"):
        single = mixture(Container)
        first = copy.deepcopy(single)
        parallelize(first, plan(fields, recompute=(RecomputeRule(pattern=pattern),)))
        model = copy.deepcopy(first)
        for m in (model, single):
            m(**tokens()).loss.backward()
        problems += differences(model, single, "gradient")
        problems += [n for n, p in first.named_parameters() if p.grad is not None]
    for m in (model, single):
        m.eval()
    with torch.no_grad():
        out = model(**tokens()).logits
    if float((full(out) - single(**tokens()).logits).abs().max()) > 1e-6:
        problems.append("eval")
    return problems


@pytest.mark.slow
def test_recomputation_evaluation_and_copies(rank_pool: RankPool) -> None:
    for problems in rank_pool.run(2, used, DP):
        assert not problems
