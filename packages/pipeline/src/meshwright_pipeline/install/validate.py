"""Validates a plan with stages before a model is divided."""

from __future__ import annotations

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Shape
from meshwright_pipeline.install.division import checked_timetable
from meshwright_pipeline.partition.units import ownership, whole_batch_module


def check_division(model: nn.Module, plan: ParallelPlan) -> None:
    """Check that the stages of `plan` fit the model, and its schedule the stages.

    Raises PlanError: naming field, value, rule and fix.
    """
    rule, degree = plan.pipeline, plan.degree("pp")
    if rule is None:
        text = f"the {degree} ranks of pp need stages: give the field pipeline, or leave pp out of degrees"
        raise PlanError("pipeline", None, text)
    owned = ownership(model, rule)
    shape = Shape(degree, len(rule.stages), rule.microbatches)
    checked_timetable(schedule_named(rule.schedule), shape)
    if plan.precision is not None and plan.precision.parameters == "fp16":
        text = "a step runs its backward passes before a gradient scaler can scale the loss, so small gradients would be lost"
        raise PlanError("precision.parameters", "fp16", f"{text}; take bf16", "bf16")
    reason = whole_batch_module(model) if rule.microbatches > 1 else None
    if reason is not None:
        text = f"{reason}; take 1, or eval() if it keeps running statistics"
        raise PlanError("pipeline.microbatches", rule.microbatches, text, "1")
    for index, recomputed in enumerate(plan.recompute):
        for name, module in model.named_modules():
            inside = any(unit.startswith(f"{name}.") for unit in owned.units)
            if name and inside and has_forward(module) and recomputed.matches(name):
                text = f"module {name!r} holds modules of several stages; recompute those instead"
                raise PlanError(f"recompute[{index}].pattern", recomputed.pattern, text)
