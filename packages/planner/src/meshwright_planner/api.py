"""`plan`, the entry point of the planner."""

from __future__ import annotations

from typing import Any, Unpack

from torch import nn

from meshwright_dtensor._torch.modes import recordable, without_inference_mode
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.compiled import Uncompiled
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, discover
from meshwright_dtensor.strategy import PlanKeywords, PlanRequest, with_plan_keywords


@with_plan_keywords
@without_inference_mode()
def plan(model: nn.Module, batch: Any, **keywords: Unpack[PlanKeywords]) -> ParallelPlan | list[ParallelPlan]:
    """Plan how to parallelize `model` over the ranks of a cluster. The model is run once on fake tensors and left untouched.

    Args:
        model: any module; its parameters may be on the meta device. Of `torch.compile(module)` it is the module, with compile=True.
        batch: one example of the GLOBAL batch: a dict of keyword arguments, a tuple of arguments, or a tensor.
        {keywords}

    Returns:
        The best plan, or with top_k > 1 a list, best first.

    Raises:
        UsageError: an option is not possible, or the model does not accept the batch.
        InfeasibleError: nothing fits; the message says by how much, and which changes would fit.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    taken = Uncompiled(model)
    try:
        if taken.patterns and keywords.get("compile") is None:
            keywords["compile"] = taken.patterns
        request = PlanRequest.of(keywords)
        planner = discover().get(PlannerSpec, request.planner).load()()
        plans = planner.plan(taken.model, recordable(batch), request)
    finally:
        taken.restore()
    return plans if request.top_k > 1 else plans[0]
