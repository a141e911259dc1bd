"""Illegal combinations are refused before anything is allocated, by a rule with a reason and a fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from moe_models import Mixture, plan_for
from parallel_models import batch_of, make, plan_of
from torch import nn

from meshwright_dtensor.deferred.materialize import deferred_init, is_deferred
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.validation.composition import RULES, check_composition


def refused(plan: ParallelPlan, states: dict[str, States]) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check_composition(make(), plan, (), states)
    return caught.value


def test_a_dim_belongs_to_one_axis() -> None:
    plan = ParallelPlan(world_size=4, degrees={"zero": 2, "tp": 2}, zero={"stage": 2})
    error = refused(plan, {"w": (0, 0)})
    assert error.value == "S(0)"
    assert "w" in error.field
    check_composition(make(), plan, (), {"w": (1, 0), "v": ("X", 0)})


def test_every_rule_is_documented() -> None:
    page = (Path(__file__).parents[4] / "docs" / "composition.md").read_text()
    for rule in RULES:
        assert rule.reason and rule.fix
        plain = page.replace("`", "")
        assert rule.name in plain, f"docs/composition.md does not list {rule.name!r}"


ZERO = {"stage": 2}
ILLEGAL: dict[str, tuple[dict[str, Any], str]] = {
    "a parameter sharded on one dim by zero and by another axis": (
        {
            "degrees": {"zero": 2, "tp": 2},
            "zero": ZERO,
            "parameters": [{"pattern": "*.up.weight", "placement": {"zero": "S(0)", "tp": "S(0)"}}],
        },
        "leave zero out of that parameter's rule",
    ),
    "a parameter sharded on one dim by two tensor axes (tp_outer, tp) that do not divide it together": (
        {
            "degrees": {"tp_outer": 2, "tp": 2},
            "parameters": [{"pattern": "embed.weight", "placement": {"tp_outer": "S(0)", "tp": "S(0)"}}],
        },
        "shard another dim on one of the axes",
    ),
    "an axis zero without a stage": ({"degrees": {"zero": 4}}, "set the field zero"),
    "a stage without an axis zero": ({"degrees": {"dp": 4}, "zero": ZERO}, 'give the mesh an axis "zero"'),
    "a field context without an axis cp": (
        {"degrees": {"dp": 4}, "context": {"attention": "ring"}},
        "axis 'cp'",
    ),
    "cp and a batch without a sequence, or one whose length it does not divide": (
        {"degrees": {"dp": 2, "cp": 2}},
        "a sequence of 5 tokens .* pad the batch",
    ),
    "an axis ep without experts": ({"degrees": {"dp": 2, "ep": 2}}, "leave ep out and use dp"),
    "experts that are sharded along ep, and inside in a way that was not proved to add up": (
        {"degrees": {"ep": 2, "tp": 2}},
        "take the state given there",
    ),
    "mixed precision of a model that is not float32": (
        {"degrees": {"dp": 4}, "precision": {"parameters": "bf16"}},
        "build the model in float32",
    ),
}


def tried(rank: int, world_size: int, name: str) -> tuple[str, bool]:
    """(error text, whether the model is unchanged and still deferred)."""
    fields, _ = ILLEGAL[name]
    experts = name.startswith("experts")
    with HOST, deferred_init(min_bytes=64):
        model: nn.Module = Mixture() if experts else make()
    if name.startswith("mixed"):
        model = make(dtype=torch.float64)
    before = list(model.parameters())
    plan = plan_of(**fields) if "parameters" not in fields else ParallelPlan(world_size=world_size, **fields)
    if experts:  # parts of the output are no parts of a sum
        right = plan_for(model, dict(plan.degrees))
        wrong = {"ep": "S(0)", "tp": "S(2)"}
        rules = [
            r.model_copy(update={"placement": wrong}) if r.pattern.endswith(".down") else r
            for r in right.parameters
        ]
        plan = right.replace(parameters=tuple(rules))
    try:
        parallelize(model, plan, batch=None if experts else batch_of())
    except (PlanError, UsageError) as error:
        untouched = all(a is b for a, b in zip(before, model.parameters(), strict=True))
        return str(error), untouched and (name.startswith("mixed") or is_deferred(model))
    return "applied", False


@pytest.mark.parametrize("name", ILLEGAL)
def test_illegal_combination_is_refused_before_allocation(rank_pool: RankPool, name: str) -> None:
    for message, untouched in rank_pool.run(4, tried, name):
        assert untouched
        with pytest.raises(PlanError, match=ILLEGAL[name][1]):
            raise PlanError("", None, message)


def test_every_rule_has_an_illegal_plan() -> None:
    assert {rule.name for rule in RULES} <= set(ILLEGAL)
