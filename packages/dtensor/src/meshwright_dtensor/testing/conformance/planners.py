"""Checks of a planner."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import InfeasibleError, PlanError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.strategy import Planner, PlanRequest
from meshwright_dtensor.testing.conformance.models import CLUSTER, batch, model
from meshwright_dtensor.testing.conformance.on_ranks import check_one_device
from meshwright_dtensor.testing.conformance.report import (
    Check,
    Nonconformance,
    Tools,
    instance,
    require,
    told,
)

RANKS = 2


def planner_of(plugin: Registered[Any]) -> Planner:
    """The planner."""
    made: Planner = instance(plugin, Planner, "meshwright_dtensor.strategy")
    return made


def request(plugin: Registered[Any], **keywords: Any) -> PlanRequest:
    """Two ranks of a small cluster."""
    return PlanRequest(cluster=CLUSTER, world_size=RANKS, planner=plugin.name, **keywords)


def plans_of(plugin: Registered[Any], of: nn.Module, **keywords: Any) -> list[ParallelPlan]:
    """The plans of one request."""
    planner = planner_of(plugin)
    shown = ", ".join(f"{name}={value!r}" for name, value in keywords.items())
    name = f"plan(model, batch, request) with world_size={RANKS}{', ' + shown if shown else ''}"
    fix = "return a list of ParallelPlan; a request that cannot be met is an InfeasibleError or UsageError that says why"
    plans = told(plugin, name, fix, lambda: planner.plan(of, batch(), request(plugin, **keywords)))
    require(
        isinstance(plans, list) and plans and all(isinstance(plan, ParallelPlan) for plan in plans),
        plugin,
        f"{name} returned {plans!r}",
        "return a list of at least one ParallelPlan, best first",
    )
    most = keywords.get("top_k", 1)
    require(
        len(plans) <= most,
        plugin,
        f"{name} returned {len(plans)} plans for top_k={most}",
        "return at most request.top_k plans",
    )
    answer: list[ParallelPlan] = plans
    return answer


def check_plans(plugin: Registered[Any], tools: Tools) -> None:
    """Plans are valid for the ranks and the installed strategies, and survive JSON."""
    axes = {registered.record.axis for registered in tools.host.strategies().values()}
    for plan in plans_of(plugin, model(), top_k=3):
        ranks = math.prod(plan.degrees.values())
        require(
            ranks == RANKS,
            plugin,
            f"a plan for {RANKS} ranks has degrees {dict(plan.degrees)}, {ranks} ranks",
            "let the product of the degrees be request.world_size",
        )
        try:
            plan.validate_for(RANKS, sorted(axes) if axes else None)
        except PlanError as error:
            fix = "write fields as meshwright_dtensor.plan documents them, and axes of installed strategies alone"
            require(False, plugin, f"a plan is not valid: {error}", fix)
        require(
            ParallelPlan.from_json(plan.to_json()) == plan,
            plugin,
            "a plan is another one after to_json() and from_json()",
            "give fields plain values: text, numbers, lists, dicts",
        )


def check_model_untouched(plugin: Registered[Any], tools: Tools) -> None:
    """The model is left as it was: values, modes, gradients, hooks."""
    examined = model()
    before = _facts(examined)
    plans_of(plugin, examined)
    after = _facts(examined)
    changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    require(
        not changed,
        plugin,
        f"plan() changed {', '.join(changed[:3])} of the model",
        "work on a copy (copy.deepcopy), or put back what you change, also when an error is raised",
    )


def _facts(of: nn.Module) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, value in of.state_dict().items():
        facts[name] = value.detach().numpy().tobytes()
    for name, parameter in of.named_parameters():
        facts[f"the gradient of {name}"] = (parameter.requires_grad, parameter.grad is None)
    for name, module in of.named_modules():
        hooks = [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        facts[f"mode, class or hooks of module {name!r}"] = (module.training, type(module), hooks)
    facts["the random numbers (torch.get_rng_state())"] = torch.get_rng_state().numpy().tobytes()
    return facts


def check_infeasible(plugin: Registered[Any], tools: Tools) -> None:
    """A memory in which nothing fits is an InfeasibleError, not a plan."""
    planner = planner_of(plugin)
    try:
        plans = planner.plan(model(), batch(), request(plugin, memory_limit=1024))
    except InfeasibleError:
        return
    except Exception as error:
        shown = f"{type(error).__name__}: {error}"
        raise Nonconformance(
            f"planner {plugin.name!r} of {plugin.distribution}: with memory_limit=1024, where nothing fits, plan() raised {shown}; "
            "raise meshwright_dtensor.errors.InfeasibleError with the bytes that are needed"
        ) from error
    require(
        False,
        plugin,
        f"with memory_limit=1024 bytes plan() returned {', '.join(map(str, plans))}, which needs more",
        "compare the bytes of one rank with request.memory_limit, or those of the cluster, and raise InfeasibleError",
    )


def check_on_ranks(plugin: Registered[Any], tools: Tools) -> None:
    """The best plan on two real ranks: losses and gradients of one device."""
    (plan,) = plans_of(plugin, model())
    fix = "plan only what the installed strategies carry out: every degree needs a strategy, every placement must divide its dim"
    check_one_device(plugin, tools, plan, "running a plan", fix)


CHECKS: tuple[Check, ...] = (
    check_plans,
    check_model_untouched,
    check_infeasible,
    check_on_ranks,
)
