"""Between what was detected and what a plan says: rules for modules and parameters, and their installation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.parameter import layout_of_dtensor
from meshwright_dtensor.plan import ExpertsRule, ParallelPlan
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, is_shard, parse_state
from meshwright_parallel.moe.detect import Detection, Experts, detect
from meshwright_parallel.moe.dispatch import Dispatch


def rule_of(experts: Experts, pattern: str) -> ExpertsRule:
    """The rule for the modules of a pattern, of which `experts` is one."""
    candidate, found = experts.candidate, experts.found
    return ExpertsRule(
        module=pattern,
        count=candidate.count,
        kind="container" if candidate.kind == "container" else "fused",
        assignment=found.assignment,
        attributes=found.attributes,
        children=candidate.experts if candidate.kind == "container" else (),
        inner=dict(experts.inner),
    )


def owner_of(plan: ParallelPlan, fqn: str, ranks: int) -> int | None:
    """The rank along the axis that owns a parameter of a container's child, None for any other parameter."""
    parts = fqn.split(".")
    for place in range(len(parts) - 1, 0, -1):
        rule = plan.experts_rule(".".join(parts[:place]))
        if rule is not None and rule.kind == "container":
            rest = ".".join(parts[place:])
            for number, child in enumerate(rule.children):
                if rest.startswith(f"{child}."):
                    return number // (rule.count // ranks)
    return None


def rules_of(detection: Detection) -> tuple[ExpertsRule, ...]:
    """One rule for all modules that are alike but for the numbers in their names."""
    if "rules" not in detection.known:
        detection.known["rules"] = _rules(detection)
    found: tuple[ExpertsRule, ...] = detection.known["rules"]
    return found


def _rules(detection: Detection) -> tuple[ExpertsRule, ...]:
    alike: dict[Any, list[Experts]] = {}
    for experts in detection.experts:
        pattern = _pattern(experts.candidate.name)
        rule = rule_of(experts, pattern)
        alike.setdefault((pattern, rule.model_dump_json()), []).append(experts)
    patterns = [pattern for pattern, _ in alike]
    rules: list[ExpertsRule] = []
    for (pattern, _), members in alike.items():
        if patterns.count(pattern) == 1:
            rules.append(rule_of(members[0], pattern))
        else:
            rules += [rule_of(e, e.candidate.name) for e in members]
    return tuple(rules)


def parameters_of(detection: Detection) -> Iterator[str]:
    """Names of the parameters that belong to experts."""
    for experts in detection.experts:
        candidate = experts.candidate
        for path in candidate.experts:
            if candidate.kind == "fused":
                yield f"{candidate.name}.{path}"
            else:
                child = candidate.module.get_submodule(path)
                yield from (f"{candidate.name}.{path}.{name}" for name, _ in child.named_parameters())


def placements_of(detection: Detection, degrees: Mapping[str, int]) -> Mapping[str, Mapping[str, str]]:
    """Parameter name -> mesh axis -> state: rows of experts are shared along "ep", and their insides along "tp"."""
    key = ("placements", degrees.get("tp", 1))
    if key not in detection.known:
        detection.known[key] = MappingProxyType(_placements(detection, degrees))
    found: Mapping[str, Mapping[str, str]] = detection.known[key]
    return found


def _placements(detection: Detection, degrees: Mapping[str, int]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for experts in detection.experts:
        candidate = experts.candidate
        if candidate.kind == "fused":
            found |= {f"{candidate.name}.{path}": {"ep": "S(0)"} for path in candidate.experts}
            if divided_inside(experts, degrees):
                for path, state in experts.inner.items():
                    found[f"{candidate.name}.{path}"]["tp"] = state
    return found


def divided_inside(experts: Experts, degrees: Mapping[str, int]) -> bool:
    """Whether each expert is divided over the ranks of "tp"."""
    ranks = degrees.get("tp", 1)

    def divides(path: str, state: State) -> bool:
        size = experts.candidate.module.get_parameter(path).shape[int(state)]
        return (
            size % (2 * ranks) == 0
            if not isinstance(state, IntervalShard)
            else all(p % ranks == 0 for p in state.parts or ())
        )

    return (
        ranks > 1
        and bool(experts.inner)
        and all(divides(path, parse_state(text, 1)) for path, text in experts.inner.items())
    )


def all_divided_inside(detection: Detection, degrees: Mapping[str, int]) -> bool:
    """Whether every one of them is."""
    key = ("inside", degrees.get("tp", 1))
    if key not in detection.known:
        detection.known[key] = all(divided_inside(experts, degrees) for experts in detection.experts)
    return bool(detection.known[key])


def notes_of(detection: Detection) -> tuple[str, ...]:
    """What was found, and what was not taken and why, a line each."""
    found = [
        f"experts: {rule.module} ({rule.count} experts, {rule.kind}, assignment by {rule.assignment})"
        for rule in rules_of(detection)
    ]
    reasons: dict[tuple[str, str], int] = {}
    for name, reason in detection.rejected:
        key = (_pattern(name), reason)
        reasons[key] = reasons.get(key, 0) + 1
    found += [f"not shared as experts: {name}: {reason}" for (name, reason), _ in reasons.items()]
    return tuple(found)


def install(model: nn.Module, plan: ParallelPlan, axis: str) -> None:
    """Dispatch tokens in every module of experts that the plan speaks of.

    A plan without rules for modules gets them from the modules whose parameters it shards on `axis`.

    Raises:
        PlanError: nothing is there to share, or a module's parameters are shared but its tokens would not be sent.
    """
    rules = {name: plan.experts_rule(name) for name, _ in model.named_modules()}
    if not plan.experts:
        rules = {e.candidate.name: rule_of(e, e.candidate.name) for e in detect(model).experts}
    shared = {name for name, p in model.named_parameters() if _shared(p, axis)}
    reached: set[str] = set()
    for name, module in model.named_modules():
        rule = rules.get(name)
        own = {f"{name}.{path}" for path, _ in module.named_parameters()}
        if rule is None or (rule.kind == "fused" and not own & shared):
            continue
        if rule.count % plan.degree(axis):
            text = f"every rank needs equally many experts, and {plan.degree(axis)} does not divide the {rule.count} of {name!r}"
            raise PlanError(f"degrees.{axis}", plan.degree(axis), text)
        kept: Any = module
        kept.forward = Dispatch(module, name, rule, axis, module.forward)
        reached |= own
    if not reached and stages_of(model) is None:  # a stage of a pipeline may have none
        raise PlanError(
            f"degrees.{axis}",
            plan.degree(axis),
            f"the plan shares the parameters of no module of experts of this {type(model).__name__} along {axis!r}",
            "1",
        )
    if shared - reached:
        name = min(shared - reached)
        raise PlanError(
            "parameters",
            name,
            f"it is sharded along {axis!r}, but no rule of plan.experts speaks of a module that holds it",
        )


def _shared(parameter: Any, axis: str) -> bool:
    layout = layout_of_dtensor(parameter)
    return is_shard(layout.states[layout.context.axes.index(axis)])


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
