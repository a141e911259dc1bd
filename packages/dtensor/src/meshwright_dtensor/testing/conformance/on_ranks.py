"""Run a plan on two real ranks and compare it with one device. Needs meshwright-parallel, and the planner for most plans."""

from __future__ import annotations

import importlib
from typing import Any

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.testing.conformance.models import CLUSTER, batch, model
from meshwright_dtensor.testing.conformance.report import NotChecked, Tools, require, sibling, told


def planned(plugin: Registered[Any], purpose: str, **keywords: Any) -> ParallelPlan:
    """The planner's plan of the small model for two ranks. NotChecked where it has none."""
    planner = sibling("meshwright_planner", purpose)
    try:
        plan = planner.plan(model(), batch(), world_size=2, cluster=CLUSTER, **keywords)
    except MeshwrightError as error:
        shown = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
        raise NotChecked(f"the small model has no plan with {shown}: {error}") from error
    assert isinstance(plan, ParallelPlan)
    return plan


def check_one_device(
    plugin: Registered[Any], tools: Tools, plan: ParallelPlan, purpose: str, fix: str
) -> None:
    """Two ranks under `plan` compute the losses, gradients and weights of one device."""
    sibling("meshwright_parallel", purpose)
    answers = told(
        plugin, f"{purpose} on two ranks", fix, lambda: tools.pool().run(2, differences, plan.to_json())
    )
    for rank, text in enumerate(answers):
        require(not text, plugin, f"rank {rank} of 2 does not compute what one device does: {text}", fix)


def differences(rank: int, world_size: int, plan: str) -> str:
    """What differs from one device; "" if nothing does."""
    verify = importlib.import_module("meshwright_parallel").verify
    report = verify(model, batch(), ParallelPlan.from_json(plan), steps=1)
    return "" if report.ok else " ".join(report.render().split())
