"""What a plan must obey, and the PlanErrors that say so: field, value, rule, nearest legal value."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticCustomError

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.intervals import parse_interval_shard
from meshwright_dtensor.utils.names import did_you_mean, listing

if TYPE_CHECKING:
    from meshwright_dtensor.plan.plan import ParallelPlan

_MOST = 2**63 - 1
_SHARD = re.compile(r"S\((0|[1-9][0-9]{0,5})\)")


def _illegal(rule: str, nearest: str | None = None) -> PydanticCustomError:
    # the message is no template of ours to fill: braces in it are escaped by passing it as context
    return PydanticCustomError("plan", "{rule}", {"rule": rule, "nearest": nearest or ""})


def within(value: int, least: int) -> int:
    """`value`, if it is at least `least` and fits 64 bits."""
    if value < least:
        raise _illegal(f"it must be at least {least}", str(least))
    if value > _MOST:
        raise _illegal("it must be less than 2**63", str(_MOST))
    return value


def text(value: str) -> str:
    """`value`, if it can be written as UTF-8: JSON can spell halves of characters, which nothing can print."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _illegal("it holds half a character (a lone surrogate); write whole ones") from None
    return value


def not_empty(value: str) -> str:
    """`value`, if there is any text in it."""
    if not value.strip():
        raise _illegal("it must not be empty")
    return value


def axis_name(value: str) -> str:
    """`value`, if it can name a mesh axis."""
    if not value.isidentifier():
        raise _illegal("a mesh axis is named by a word of letters, digits and underscores", "tp")
    return value


def axis_product(value: str) -> str:
    """`value`, if it names one mesh axis or several joined by "+"."""
    for part in value.split("+"):
        axis_name(part)
    return value


def value_state(text: str) -> str:
    """`text`, if it is the state of an activation on one mesh axis."""
    if text in ("I", "X", "P") or _is_shard(text):
        return text
    raise _illegal(
        "a state is one of I, X, P, S(dim) with dim >= 0, and runs of a dim as in S(0; 64+32+32)",
        _nearest_state(text, ("I", "X", "P")),
    )


def parameter_state(text: str) -> str:
    """`text`, if a parameter can have that state on a mesh axis."""
    if text == "I" or _is_shard(text):
        return text
    raise _illegal(
        "a parameter is I (replicated), S(dim) with dim >= 0, or has runs of a dim as in S(0; 64+32+32)",
        _nearest_state(text, ("I",)),
    )


def _is_shard(text: str) -> bool:
    if _SHARD.fullmatch(text):
        return True
    try:
        return parse_interval_shard(text) is not None
    except ValueError as error:
        raise _illegal(str(error)) from None


def _nearest_state(text: str, letters: tuple[str, ...]) -> str:
    """The legal state that a wrong text most likely means."""
    shown = text[:200].strip().lower()
    digits = re.search(r"[0-9]{1,5}", shown)
    if digits and (shown[0] in "s[(" or shown[0].isdigit()):
        return f"S({int(digits.group())})"
    if shown.startswith(("s", "-")):
        return "S(0)"
    if shown[:1].upper() in letters:
        return shown[0].upper()
    if shown.startswith("p") and "P" in letters:
        return "P"
    return "I"


def plan_error(model: type[BaseModel], error: ValidationError) -> PlanError:
    """pydantic's first finding as a PlanError. Unknown fields come first: they are the usual cause of the others."""
    found = error.errors(include_url=False)
    first = next((item for item in found if item["type"] == "extra_forbidden"), found[0])
    # pydantic marks errors in keys with "[key]" and union branches with type names; neither is part of the path
    place = _path(first["loc"])
    value = first.get("input")
    kind = first["type"]
    context: Mapping[str, Any] = first.get("ctx", {})
    if kind == "extra_forbidden":
        name = str(first["loc"][-1])
        names = list(_fields_at(model, first["loc"][:-1]))
        close = did_you_mean(name, names)
        return PlanError(place, value, f"there is no such field; the fields are {listing(names, 16)}", close)
    if kind == "missing":
        return PlanError(place, None, "it is required and missing")
    if kind == "plan":
        return PlanError(place, value, context["rule"], context.get("nearest") or None)
    if kind == "literal_error" and first["loc"] == ("version",):
        return PlanError(
            place, value, "this release reads plans of version 1; upgrade meshwright-dtensor", "1"
        )
    if kind == "literal_error":
        choices = [
            choice.strip().strip("'") for choice in re.split(r",| or ", str(context.get("expected", "")))
        ]
        close = did_you_mean(value, choices) or choices[0]
        return PlanError(place, value, f"it must be one of {listing(choices)}", close)
    rule = first["msg"].replace("Input should be", "it should be").replace("Value error, ", "")
    return PlanError(place, value, rule[:1].lower() + rule[1:])


def _path(location: tuple[int | str, ...]) -> str:
    text = ""
    for part in location:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part != "[key]":
            shown = str(part).encode("ascii", "backslashreplace").decode()
            text += f".{shown}" if text else shown
    return text or "(document)"


def _fields_at(model: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    """The field names of the model that stands at `location` inside `model`."""
    for part in location:
        if isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation) or model
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(part) for part in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found), None)


def check(plan: ParallelPlan, world_size: int | None, axes: tuple[str, ...] | None) -> None:
    """How the fields fit each other, and the run. Raises PlanError at the first that does not."""
    _check_axes(plan, axes)
    product = math.prod(plan.degrees.values())
    if product != plan.world_size:
        rule = f"their product is {product}, and must be world_size, {plan.world_size}"
        raise PlanError(
            "degrees", dict(plan.degrees), rule, _nearest_degrees(dict(plan.degrees), plan.world_size)
        )
    if world_size is not None and plan.world_size != world_size:
        near = _nearest_degrees(dict(plan.degrees), world_size)
        rule = f"the run has {world_size} ranks; launch {plan.world_size} ranks or plan for {world_size}"
        raise PlanError("world_size", plan.world_size, rule, f"{world_size} with {near}")
    _check_parameters(plan)
    _check_activations(plan)
    if plan.context is not None and "cp" not in plan.degrees:
        rule = f"it speaks of the axis 'cp', and the axes of the plan are {listing(plan.degrees)}"
        raise PlanError("context", plan.context.attention, f"{rule}; add cp to degrees or remove the field")
    _check_experts(plan)
    _check_pipeline(plan)
    for index, collective in enumerate(plan.collectives):
        for axis in collective.axis.split("+"):
            _known_axis(plan, f"collectives[{index}].axis", axis)


def _check_axes(plan: ParallelPlan, axes: tuple[str, ...] | None) -> None:
    for axis in plan.strategies:
        _known_axis(plan, f"strategies.{axis}", axis)
    for axis, degree in plan.degrees.items():
        if axes is not None and axis not in axes:
            known = (
                f"the axes with a strategy are {listing(axes)}"
                if axes
                else ("no strategy is installed; pip install meshwright-parallel")
            )
            close = did_you_mean(axis, axes)
            raise PlanError(
                f"degrees.{axis}", degree, f"no installed strategy works on axis {axis!r}; {known}", close
            )


def _known_axis(plan: ParallelPlan, field: str, axis: str) -> None:
    if axis not in plan.degrees:
        close = did_you_mean(axis, plan.degrees)
        raise PlanError(
            field, axis, f"the plan has no axis {axis!r}; its axes are {listing(plan.degrees)}", close
        )


def _check_parameters(plan: ParallelPlan) -> None:
    seen: dict[str, int] = {}
    for index, rule in enumerate(plan.parameters):
        first = seen.setdefault(rule.pattern, index)
        if first != index:
            text = f"parameters[{first}] has the same pattern, and the first match wins; merge the two"
            raise PlanError(f"parameters[{index}].pattern", rule.pattern, text)
        for axis in rule.placement:
            _known_axis(plan, f"parameters[{index}].placement.{axis}", axis)


def _check_activations(plan: ParallelPlan) -> None:
    seen: dict[tuple[str, str, int], int] = {}
    for index, rule in enumerate(plan.activations):
        key = (rule.module, rule.function, rule.occurrence)
        first = seen.setdefault(key, index)
        if first != index:
            text = f"activations[{first}] speaks of the same call, and the first match wins; merge the two"
            raise PlanError(f"activations[{index}]", key, text)
        for side, values in (("inputs", rule.inputs), ("outputs", rule.outputs or ())):
            for place, states in enumerate(values):
                for axis in states or {}:
                    _known_axis(plan, f"activations[{index}].{side}[{place}].{axis}", axis)


def _check_experts(plan: ParallelPlan) -> None:
    seen: dict[str, int] = {}
    for index, rule in enumerate(plan.experts):
        first = seen.setdefault(rule.module, index)
        if first != index:
            text = f"experts[{first}] has the same pattern, and the first match wins; merge the two"
            raise PlanError(f"experts[{index}].module", rule.module, text)
        if rule.count % plan.degree("ep"):
            text = (
                f"the {plan.degree('ep')} ranks of ep share experts equally, so that it must divide by that"
            )
            raise PlanError(f"experts[{index}].count", rule.count, text)
        named = len(set(rule.children))
        if named != (rule.count if rule.kind == "container" else 0) or named != len(rule.children):
            text = f"a container of {rule.count} experts names each of them once, any other kind names none"
            raise PlanError(f"experts[{index}].children", list(rule.children), text)


def _check_pipeline(plan: ParallelPlan) -> None:
    pipeline, degree = plan.pipeline, plan.degree("pp")
    if pipeline is None:
        return
    if "pp" not in plan.degrees:
        rule = f"it speaks of the axis 'pp', and the axes of the plan are {listing(plan.degrees)}"
        raise PlanError("pipeline", pipeline.schedule, f"{rule}; add pp to degrees or remove the field")
    count = len(pipeline.stages)
    if count == 0 or count % degree:
        rule = f"each of the {degree} ranks of pp has equally many stages, at least one"
        nearest = max(1, round(count / degree)) * degree
        raise PlanError("pipeline.stages", f"{count} stages", rule, f"{nearest} stages")
    for index, stage in enumerate(pipeline.stages):
        if not stage:
            raise PlanError(f"pipeline.stages[{index}]", [], "a stage needs at least one module")


def _nearest_degrees(degrees: dict[str, int], world_size: int) -> str:
    """Degrees close to these whose product is world_size: one axis changed where that is enough."""
    product = math.prod(degrees.values())
    options = []
    for axis, degree in degrees.items():
        rest = product // degree
        if world_size % rest == 0:
            options.append((abs(math.log(world_size // rest) - math.log(degree)), axis, world_size // rest))
    if options:
        _, axis, degree = min(options)
        return _show({**degrees, axis: degree})
    # outer axes take what is left once inner ones, in turn, took the largest divisor that is not above their degree
    left, found = world_size, {}
    for axis, degree in reversed(degrees.items()):
        found[axis] = math.gcd(left, degree)
        left //= found[axis]
    nearest = {axis: found[axis] for axis in degrees}
    if not nearest:
        return _show({"dp": world_size})
    outer = next(iter(nearest))
    nearest[outer] *= left
    return _show(nearest)


def _show(degrees: Mapping[str, int]) -> str:
    return ", ".join(f"{axis}={degree}" for axis, degree in degrees.items())
