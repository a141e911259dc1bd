"""Checks of how the fields of a plan fit each other and the run. PlanErrors name field, value, rule and nearest legal value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan.fields import PlanFields
from meshwright_dtensor.utils.names import count_of, did_you_mean, listing


def check(plan: PlanFields, world_size: int | None, axes: tuple[str, ...] | None) -> None:
    """Raise PlanError for the first field that does not fit the others or the run."""
    _check_axes(plan, axes)
    product = math.prod(plan.degrees.values())
    if product != plan.world_size:
        rule = f"their product is {product}, and must be world_size, {plan.world_size}"
        degrees = dict(plan.degrees)
        raise PlanError("degrees", degrees, rule, _nearest_degrees(degrees, plan.world_size))
    if world_size is not None and plan.world_size != world_size:
        near = _nearest_degrees(dict(plan.degrees), world_size)
        rule = f"the run has {count_of(world_size, 'rank')}; launch {count_of(plan.world_size, 'rank')} or plan for {world_size}"
        raise PlanError("world_size", plan.world_size, rule, f"{world_size} with {near}")
    _check_parameters(plan)
    _check_owners(plan)
    _check_activations(plan)
    if plan.context is not None and "cp" not in plan.degrees:
        rule = f"it needs the axis 'cp', and the axes of the plan are {listing(plan.degrees)}"
        raise PlanError("context", plan.context.attention, f"{rule}; add cp to degrees or remove the field")
    _check_experts(plan)
    _check_pipeline(plan)
    if plan.rng == "fast" and plan.degree("pp") > 1:
        rule = "a pipeline replays the random numbers of whole batches for its microbatches, which shards have no streams for"
        raise PlanError("rng", plan.rng, rule, "exact")
    for index, collective in enumerate(plan.collectives):
        for axis in collective.axis.split("+"):
            _known_axis(plan, f"collectives[{index}].axis", axis)


def _check_axes(plan: PlanFields, axes: tuple[str, ...] | None) -> None:
    for axis in plan.strategies:
        _known_axis(plan, f"strategies.{axis}", axis)
    for axis, degree in plan.degrees.items():
        if axes is not None and axis not in axes:
            installed = f"the axes with a strategy are {listing(axes)}"
            if not axes:
                installed = "no strategy is installed; pip install meshwright-parallel"
            rule = f"no installed strategy works on axis {axis!r}; {installed}"
            raise PlanError(f"degrees.{axis}", degree, rule, did_you_mean(axis, axes))


def _known_axis(plan: PlanFields, field: str, axis: str) -> None:
    if axis not in plan.degrees:
        rule = f"the plan has no axis {axis!r}; its axes are {listing(plan.degrees)}"
        raise PlanError(field, axis, rule, did_you_mean(axis, plan.degrees))


def _refuse_repeated(
    seen: dict[Any, int], key: Any, index: int, rules: str, field: str, alike: str = "has the same pattern"
) -> None:
    first = seen.setdefault(key, index)
    if first != index:
        text = f"{rules}[{first}] {alike}, and the first match wins; merge the two"
        raise PlanError(f"{rules}[{index}]{field}", key, text)


def _check_parameters(plan: PlanFields) -> None:
    seen: dict[Any, int] = {}
    for index, rule in enumerate(plan.parameters):
        _refuse_repeated(seen, rule.pattern, index, "parameters", ".pattern")
        for axis in rule.placement:
            _known_axis(plan, f"parameters[{index}].placement.{axis}", axis)


def _check_owners(plan: PlanFields) -> None:
    for name, owner in ({} if plan.zero is None else plan.zero.owners).items():
        if owner >= plan.degree("zero"):
            rule = f"zero has {count_of(plan.degree('zero'), 'rank')}, and the first is 0"
            raise PlanError(f"zero.owners.{name}", owner, rule, str(plan.degree("zero") - 1))
        ruled = plan.parameter_rule(name)
        if ruled is not None and "zero" in ruled.placement:
            rule = f"the rule {ruled.pattern!r} places this parameter along zero too; remove one of them"
            raise PlanError(f"zero.owners.{name}", owner, rule)


def _check_activations(plan: PlanFields) -> None:
    seen: dict[Any, int] = {}
    for index, rule in enumerate(plan.activations):
        key = (
            rule.module,
            rule.function,
            rule.occurrence,
            *(() if rule.forward is None else (rule.forward,)),
        )
        _refuse_repeated(seen, key, index, "activations", "", "is for the same call")
        for side, values in (("inputs", rule.inputs), ("outputs", rule.outputs or ())):
            for place, states in enumerate(values):
                for axis in states or {}:
                    _known_axis(plan, f"activations[{index}].{side}[{place}].{axis}", axis)


def _check_experts(plan: PlanFields) -> None:
    seen: dict[Any, int] = {}
    ranks = plan.degree("ep")
    for index, rule in enumerate(plan.experts):
        _refuse_repeated(seen, rule.module, index, "experts", ".module")
        if rule.count % ranks:
            text = f"the {ranks} ranks of ep share experts equally, so that it must divide by that"
            raise PlanError(f"experts[{index}].count", rule.count, text)
        named = len(set(rule.children))
        if named != (rule.count if rule.kind == "container" else 0) or named != len(rule.children):
            text = f"a container of {rule.count} experts names each of them once, any other kind names none"
            raise PlanError(f"experts[{index}].children", list(rule.children), text)


def _check_pipeline(plan: PlanFields) -> None:
    pipeline, degree = plan.pipeline, plan.degree("pp")
    if pipeline is None:
        return
    if "pp" not in plan.degrees:
        rule = f"it needs the axis 'pp', and the axes of the plan are {listing(plan.degrees)}"
        raise PlanError("pipeline", pipeline.schedule, f"{rule}; add pp to degrees or remove the field")
    count = len(pipeline.stages)
    if count == 0 or count % degree:
        rule = f"each of the {degree} ranks of pp has equally many stages, at least one"
        nearest = max(1, round(count / degree)) * degree
        raise PlanError("pipeline.stages", count_of(count, "stage"), rule, count_of(nearest, "stage"))
    for index, stage in enumerate(pipeline.stages):
        if not stage:
            raise PlanError(f"pipeline.stages[{index}]", [], "a stage needs at least one module")


def _nearest_degrees(degrees: dict[str, int], world_size: int) -> str:
    """Degrees close to these whose product is world_size: one axis changed if that is enough."""
    product = math.prod(degrees.values())
    options = []
    for axis, degree in degrees.items():
        rest = product // degree
        if world_size % rest == 0:
            options.append((abs(math.log(world_size // rest) - math.log(degree)), axis, world_size // rest))
    if options:
        _, axis, degree = min(options)
        return _show({**degrees, axis: degree})
    # inner axes take the largest common divisor in turn, the outermost takes the rest
    left, nearest = world_size, dict(degrees)
    for axis, degree in reversed(degrees.items()):
        nearest[axis] = math.gcd(left, degree)
        left //= nearest[axis]
    outer = next(iter(nearest), "dp")
    nearest[outer] = nearest.get(outer, 1) * left
    return _show(nearest)


def _show(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
