"""pipeline(model, plan): stages and schedule on ordinary parameters, without other parallelism."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.trace.one_device import show_one_device
from meshwright_pipeline.install.division import StageDivision, check_division


def pipeline(model: nn.Module, plan: ParallelPlan) -> nn.Module:
    """Divide `model` into the stages of `plan`, in place; every parameter stays an ordinary one.

    Args:
        model: an ordinary module, the same on every rank, with no optimizer over its parameters yet.
        plan: its only axis with more than one rank is "pp". `meshwright_parallel.parallelize` takes any plan.

    Returns:
        `model`, of which this rank holds its stages. A call runs a step of the schedule and returns the loss, whose
        `backward()` passes the gradients to the parameters.

    Raises PlanError: the plan does not fit the run or the model, or has other axes.
    """
    alone = "pipeline() runs stages and schedule alone; use meshwright_parallel.parallelize"
    for field in ("precision", "recompute", "zero"):
        if getattr(plan, field):
            raise PlanError(field, getattr(plan, field), alone)
    device = init()
    plan.validate_for(dist.get_world_size())
    others = {axis: degree for axis, degree in plan.degrees.items() if axis != "pp" and degree > 1}
    if others or plan.pipeline is None:
        rule = 'pipeline() works along the axis "pp" alone; use meshwright_parallel.parallelize'
        raise PlanError("degrees", dict(plan.degrees), rule)
    check_division(model, plan)
    group = dist.group.WORLD
    assert group is not None
    division = StageDivision(model.to(device), plan.pipeline, group, split=True, predicted=plan.predicted)
    division.install(model, None, device, plain=True)
    show_one_device(model)
    model.parallel_plan = plan  # type: ignore[assignment]
    return model
