"""The plan inside one pipeline stage: a plan without the axis that divides the model by modules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.stage_info import link_stage, mark_repeated, stages_of
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import Strategy


@dataclass(frozen=True)
class StagePlan:
    """A plan without its pipeline axis.

    Attributes:
        outer: the strategy that divides the model by modules, None where none does.
        plan: the plan without the axis of `outer`.
        strategies: of the axes of `plan`.
    """

    outer: Strategy | None
    plan: ParallelPlan
    strategies: tuple[Strategy, ...]


def split_plan(plan: ParallelPlan, strategies: Sequence[Strategy]) -> StagePlan:
    """Separate the pipeline axis from the rest of a plan. Raises PlanError: two axes divide the model."""
    outer = [s for s in strategies if s.divides and plan.degree(s.axis) > 1]
    if len(outer) > 1:
        names = " and ".join(s.axis for s in outer)
        raise PlanError("degrees", dict(plan.degrees), f"{names} both divide the model by modules; keep one")
    dividing = {s.axis for s in strategies if s.divides}
    if not dividing:
        return StagePlan(None, plan, tuple(strategies))
    degrees = {axis: degree for axis, degree in plan.degrees.items() if axis not in dividing}
    named = {axis: name for axis, name in plan.strategies.items() if axis not in dividing}
    ranks = plan.world_size // (plan.degree(outer[0].axis) if outer else 1)
    whole = {"pipeline": None, "collectives": (), "predicted": None}
    inner = plan.replace(world_size=ranks, degrees=degrees, strategies=named, **whole)
    remaining = tuple(s for s in strategies if s.axis not in dividing)
    return StagePlan(outer[0] if outer else None, inner, remaining)


def link_stages(model: nn.Module, mesh: DeviceMesh) -> None:
    """Attach the stage information to the mesh and to parameters that several stages hold."""
    info = stages_of(model)
    if info is None:
        return
    link_stage(mesh, info)
    for name, parameter in model.named_parameters():
        if name in info.repeated:
            mark_repeated(parameter)
