"""The table of illegal combinations of parallelisms, each with its reason and the fix.

`check_composition` runs before any memory is allocated. Each rule has a function of the situation, which returns the
offending (field, value) of the plan, or None. docs/composition.md has the same table for users.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.ragged import can_gather
from meshwright_dtensor.sharding.states import State, States, format_state, parse_state

if TYPE_CHECKING:
    from torch import nn

    from meshwright_dtensor.plan import ParallelPlan
    from meshwright_dtensor.strategy import Strategy

Found = tuple[str, object]


@dataclass(frozen=True)
class Situation:
    """A model and the plan that is about to be applied to it.

    Attributes:
        strategies: one per mesh axis, in mesh order.
        states: parameter name -> state per mesh axis in which it will be stored.
    """

    model: nn.Module
    plan: ParallelPlan
    strategies: Sequence[Strategy]
    states: Mapping[str, States]


@dataclass(frozen=True)
class Rule:
    """One illegal combination.

    Attributes:
        name: the combination, as in the table of the documentation.
        broken: the offending plan field and its value, None where the plan is legal.
        reason: why it is illegal.
        fix: what to do instead.
    """

    name: str
    broken: Callable[[Situation], Found | None]
    reason: str
    fix: str


def _two_axes_on_one_dim(here: Situation) -> Found | None:
    if here.plan.degree("zero") == 1:
        return None
    zero = here.plan.axes.index("zero")
    sizes, shapes = tuple(here.plan.degrees.values()), _shapes(here.model)
    for name, states in here.states.items():
        sharded = states[zero]
        if not isinstance(sharded, int):
            continue
        # each rank of zero has one run of what the other axis leaves
        if name in shapes and can_gather(shapes[name], sizes, states, zero):
            continue
        for axis, state in zip(here.plan.axes, states, strict=True):
            if axis not in ("zero", "dp") and _shards(state, int(sharded)) and here.plan.degree(axis) > 1:
                return f"parameters ({name}).zero", format_state(sharded)
    return None


def _shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}


def _unequal_nesting(here: Situation) -> Found | None:
    degree = here.plan.degree
    strategies = enumerate(here.strategies)
    searched = [(i, s.axis) for i, s in strategies if s.placement_search and degree(s.axis) > 1]
    if len(searched) < 2:
        return None
    for name, parameter in here.model.named_parameters():
        for dim, size in enumerate(parameter.shape):
            axes = [(place, axis) for place, axis in searched if _shards(here.states[name][place], dim)]
            if len(axes) > 1 and size % math.prod(degree(axis) for _, axis in axes):
                place, axis = axes[-1]
                return f"parameters ({name}).{axis}", format_state(here.states[name][place])
    return None


def _shards(state: State, dim: int) -> bool:
    return isinstance(state, int) and int(state) == dim


def _zero_without_stage(here: Situation) -> Found | None:
    return ("zero", None) if here.plan.degree("zero") > 1 and here.plan.zero is None else None


def _stage_without_zero(here: Situation) -> Found | None:
    zero = here.plan.zero
    return ("zero.stage", zero.stage) if zero is not None and "zero" not in here.plan.degrees else None


def _low_precision_model(here: Situation) -> Found | None:
    precision = here.plan.precision
    if precision is None or precision.parameters == "fp32":
        return None
    for name, parameter in here.model.named_parameters():
        if parameter.is_floating_point() and str(parameter.dtype) != "torch.float32":
            return "precision.parameters", f"{precision.parameters} for {name!r} of {parameter.dtype}"
    return None


def _no_experts(here: Situation) -> Found | None:
    if here.plan.degree("ep") == 1:
        return None
    place = here.plan.axes.index("ep")
    shared = any(isinstance(states[place], int) for states in here.states.values())
    return None if shared else ("degrees.ep", here.plan.degree("ep"))


def _parted_experts(here: Situation) -> Found | None:
    if here.plan.degree("ep") == 1:
        return None
    for name, states in here.states.items():
        placed = dict(zip(here.plan.axes, states, strict=True))
        if not isinstance(placed["ep"], int):
            continue
        proved = {
            f"{owner}.{path}": text
            for owner in (name.rsplit(".", n)[0] for n in range(1, name.count(".") + 1))
            for path, text in getattr(here.plan.experts_rule(owner), "inner", {}).items()
        }
        for axis, state in placed.items():
            if axis in ("ep", "zero") or not isinstance(state, int) or here.plan.degree(axis) == 1:
                continue
            if name not in proved or parse_state(proved[name], here.plan.degree(axis)) != state:
                return f"parameters ({name}).{axis}", format_state(state)
    return None


RULES: tuple[Rule, ...] = (
    Rule(
        name="a parameter sharded on one dim by zero and by another axis",
        broken=_two_axes_on_one_dim,
        reason="zero gathers its shards for use while the other axis keeps its own, so each needs another dim",
        fix="leave zero out of that parameter's rule, so that a free dim is chosen",
    ),
    Rule(
        name="a parameter sharded on one dim by two tensor axes (tp_outer, tp) that do not divide it together",
        broken=_unequal_nesting,
        reason="the inner axis shards what each rank of the outer one holds, which must have the same length on all ranks",
        fix="shard another dim on one of the axes, or leave one of them out of that parameter's rule",
    ),
    Rule(
        name="an axis zero without a stage",
        broken=_zero_without_stage,
        reason="the stage says what the ranks along zero shard",
        fix='set the field zero to {"stage": 1}, 2 or 3',
    ),
    Rule(
        name="a stage without an axis zero",
        broken=_stage_without_zero,
        reason="there are no ranks to shard over",
        fix='give the mesh an axis "zero" (degrees), or remove the field',
    ),
    Rule(
        name="an axis ep without experts",
        broken=_no_experts,
        reason="the plan shards no parameter of any module of experts along ep",
        fix='place the parameters of experts ("ep": "S(0)"), or leave ep out and use dp',
    ),
    Rule(
        name="experts that are sharded along ep, and inside in a way that was not proved to add up",
        broken=_parted_experts,
        reason="the parts of an expert must add up to it, which is proved for the states in experts.inner only",
        fix='take the state given there, or leave the other axis out of the rule of that parameter ("I")',
    ),
    Rule(
        name="mixed precision of a model that is not float32",
        broken=_low_precision_model,
        reason="the model's parameters are the float32 master weights of the low-precision ones",
        fix="build the model in float32, or leave precision out and compute in the model's own dtype",
    ),
)
"""All rules; the first broken one is reported."""


def check_composition(
    model: nn.Module, plan: ParallelPlan, strategies: Sequence[Strategy], states: Mapping[str, States]
) -> None:
    """Refuse a plan with an illegal combination, before anything is allocated. Raises PlanError with the reason and the fix."""
    here = Situation(model, plan, strategies, states)
    for rule in RULES:
        broken = rule.broken(here)
        if broken is not None:
            field, value = broken
            raise PlanError(field, value, f"{rule.reason}; {rule.fix}")
