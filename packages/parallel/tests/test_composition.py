"""Illegal combinations are refused before anything is allocated, by a rule with a reason and a fix."""

from __future__ import annotations

from pathlib import Path

import pytest
from parallel_models import make

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.states import States
from meshwright_parallel.composition import RULES, check_composition


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
    page = (Path(__file__).parents[3] / "docs" / "composition.md").read_text()
    for rule in RULES:
        assert rule.reason and rule.fix
        plain = page.replace("`", "")
        assert rule.name in plain, f"docs/composition.md does not list {rule.name!r}"
