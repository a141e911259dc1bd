"""Which modules of a model run their experts on the tokens that each rank has, and the forward that does it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from meshwright_dtensor.plan import ExpertsRule, ParallelPlan
from meshwright_dtensor.strategy import Strategy
from meshwright_parallel.moe.detect import detect
from meshwright_parallel.moe.local_tokens import Apart
from meshwright_parallel.moe.plan_rules import rule_of
from meshwright_parallel.recompute.checkpoint import recomputed_modules


def modules_apart(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> dict[str, ExpertsRule]:
    """Name -> rule of the modules of experts that every rank runs on its own rows.

    Those are what the plan calls experts, or where it says nothing what the probe finds, if a data-like axis may divide the
    rows and none shares the experts. Call it while parameters are as the user made them: copies of modules are run.
    """
    divided = any(s.gradient == "deferred" and plan.degree(s.axis) > 1 for s in strategies)
    if not divided or plan.degree("ep") > 1:
        return {}
    if plan.experts:
        every = {name: plan.experts_rule(name) for name, _ in model.named_modules()}
        rules = {name: rule for name, rule in every.items() if rule is not None}
    else:
        rules = {e.candidate.name: rule_of(e, e.candidate.name) for e in detect(model).experts}
    # a second run of an inner module would find it as it is outside of a call
    again = recomputed_modules(model, plan) if plan.recompute else {}
    return {n: rule for n, rule in rules.items() if not any(inner.startswith(f"{n}.") for inner in again)}


def install_apart(model: nn.Module, rules: Mapping[str, ExpertsRule]) -> None:
    """Let the modules of these names run their experts on the rows that this rank has."""
    for name, module in model.named_modules():
        if name in rules and next(module.parameters(), None) is not None:
            kept: Any = module
            kept.forward = Apart(module, name, rules[name], module.forward)
