"""Choose the modules whose experts run on local tokens, and install their forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from meshwright_dtensor.plan import ExpertsRule, ParallelPlan
from meshwright_dtensor.strategy import Strategy
from meshwright_parallel.moe.local_tokens import LocalTokens
from meshwright_parallel.moe.plan_rules import expert_rules
from meshwright_parallel.recompute.checkpoint import recomputed_modules


def local_token_modules(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> dict[str, ExpertsRule]:
    """Name -> rule of the modules of experts that every rank runs on its own rows.

    These are the experts in the plan, or those that the probe finds. There are none unless an axis may shard the rows and no
    axis shards the experts. Call it before parameters are sharded: the probe runs copies of modules.
    """
    may_shard_rows = any(s.gradient == "deferred" and plan.degree(s.axis) > 1 for s in strategies)
    if not may_shard_rows or plan.degree("ep") > 1:
        return {}
    rules = expert_rules(model, plan)
    # recomputing an inner module would run it outside of the call that swaps parameters
    recomputed = recomputed_modules(model, plan) if plan.recompute else {}
    return {n: rule for n, rule in rules.items() if not any(r.startswith(f"{n}.") for r in recomputed)}


def install_local_tokens(model: nn.Module, rules: Mapping[str, ExpertsRule]) -> None:
    """Let the modules of these names run their experts on this rank's rows."""
    for name, module in model.named_modules():
        if name in rules and next(module.parameters(), None) is not None:
            module.forward = LocalTokens(module, name, rules[name], module.forward)
