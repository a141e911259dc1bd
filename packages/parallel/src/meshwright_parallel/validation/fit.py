"""Check that a plan fits a model and a batch: all checks of `parallelize` that need neither ranks nor values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy.resolve import resolve_strategies
from meshwright_parallel.placement.stage_plan import StagePlan, split_plan, with_inner_axis
from meshwright_parallel.recompute.checkpoint import recomputed_modules
from meshwright_parallel.validation.checks import check_dense, check_plan, stored_states


@dataclass(frozen=True)
class Fit:
    """A plan that fits.

    Attributes:
        whole: the plan, with an axis for the mesh of the parameters.
        part: the same, with the pipeline axis separated.
        states: parameter name -> state per mesh axis of `part`.
    """

    whole: ParallelPlan
    part: StagePlan
    states: Mapping[str, tuple[State, ...]]


def check_fit(model: nn.Module, plan: ParallelPlan, batch: Any, host: PluginHost, world_size: int) -> Fit:
    """Check that a plan fits.

    Args:
        model: a plain module; its parameters need no values.
        plan: any.
        batch: an example of what the model is called with, or None.
        host: where strategies are looked up.
        world_size: ranks of the run.

    Raises:
        PlanError, UsageError, UnsupportedError, PluginError: as `parallelize`.
    """
    whole = with_inner_axis(plan)
    part = split_plan(whole, resolve_strategies(whole, host, world_size))
    states = stored_states(model, part.plan, part.strategies)
    check_plan(model, part.plan, part.strategies, batch, states)
    recomputed_modules(model, part.plan)
    if part.outer is None or any(degree > 1 for degree in part.plan.degrees.values()):
        check_dense(model)
    if part.outer is not None:
        part.outer.check(model, whole)
    return Fit(whole, part, states)
