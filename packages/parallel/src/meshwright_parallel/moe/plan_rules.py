"""Plan rules of experts: from detected modules to rules and placements, and the installation of token dispatch."""

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
    candidate, proved = experts.candidate, experts.proved
    return ExpertsRule(
        module=pattern,
        count=candidate.count,
        kind="container" if candidate.kind == "container" else "fused",
        assignment=proved.assignment,
        attributes=proved.attributes,
        children=candidate.experts if candidate.kind == "container" else (),
        inner=dict(experts.inner),
    )


def owner_of(plan: ParallelPlan, fqn: str, ranks: int) -> int | None:
    """The rank along the axis that owns a parameter of a container's child, None for any other parameter."""
    parts = fqn.split(".")
    for length in range(len(parts) - 1, 0, -1):
        rule = plan.experts_rule(".".join(parts[:length]))
        if rule is not None and rule.kind == "container":
            path = ".".join(parts[length:])
            for expert, child in enumerate(rule.children):
                if path.startswith(f"{child}."):
                    return expert // (rule.count // ranks)
    return None


def expert_rules(model: nn.Module, plan: ParallelPlan) -> dict[str, ExpertsRule]:
    """Module name -> rule: those of the plan, or of the experts that the probe finds."""
    if not plan.experts:
        return {e.candidate.name: rule_of(e, e.candidate.name) for e in detect(model).experts}
    rules = {name: plan.experts_rule(name) for name, _ in model.named_modules()}
    return {name: rule for name, rule in rules.items() if rule is not None}


def rules_of(detection: Detection) -> tuple[ExpertsRule, ...]:
    """One rule for all modules whose names differ in numbers only."""
    return detection.memo.once("rules", lambda: _rules(detection))


def _rules(detection: Detection) -> tuple[ExpertsRule, ...]:
    equal: dict[Any, list[Experts]] = {}
    for experts in detection.experts:
        pattern = _pattern(experts.candidate.name)
        equal.setdefault((pattern, rule_of(experts, pattern).model_dump_json()), []).append(experts)
    patterns = [pattern for pattern, _ in equal]
    rules: list[ExpertsRule] = []
    for (pattern, _), members in equal.items():
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
    """Parameter name -> mesh axis -> state: dim 0 is sharded along "ep", the intermediate dim of each expert along "tp"."""
    key = ("placements", degrees.get("tp", 1))
    return detection.memo.once(key, lambda: MappingProxyType(_placements(detection, degrees)))


def _placements(detection: Detection, degrees: Mapping[str, int]) -> dict[str, dict[str, str]]:
    placements: dict[str, dict[str, str]] = {}
    for experts in detection.experts:
        candidate = experts.candidate
        if candidate.kind == "fused":
            placements |= {f"{candidate.name}.{path}": {"ep": "S(0)"} for path in candidate.experts}
            if divided_inside(experts, degrees):
                for path, state in experts.inner.items():
                    placements[f"{candidate.name}.{path}"]["tp"] = state
    return placements


def divided_inside(experts: Experts, degrees: Mapping[str, int]) -> bool:
    """Whether each expert is sharded over the ranks of "tp"."""
    ranks = degrees.get("tp", 1)

    def divides(path: str, state: State) -> bool:
        size = experts.candidate.module.get_parameter(path).shape[int(state)]
        if isinstance(state, IntervalShard):
            return all(p % ranks == 0 for p in state.parts or ())
        return size % (2 * ranks) == 0

    states = {path: parse_state(text, 1) for path, text in experts.inner.items()}
    return ranks > 1 and bool(states) and all(divides(path, state) for path, state in states.items())


def all_divided_inside(detection: Detection, degrees: Mapping[str, int]) -> bool:
    """Whether every expert of the model is sharded over the ranks of "tp"."""
    key = ("inside", degrees.get("tp", 1))
    return detection.memo.once(key, lambda: all(divided_inside(e, degrees) for e in detection.experts))


def notes_of(detection: Detection) -> tuple[str, ...]:
    """Notes for the plan: detected experts, and rejected modules with the reason."""
    notes = [
        f"experts: {rule.module} ({rule.count} experts, {rule.kind}, assignment by {rule.assignment})"
        for rule in rules_of(detection)
    ]
    reasons = dict.fromkeys((_pattern(name), reason) for name, reason in detection.rejected)
    notes += [f"not sharded as experts: {name}: {reason}" for name, reason in reasons]
    return tuple(notes)


def install(model: nn.Module, plan: ParallelPlan, axis: str) -> None:
    """Install token dispatch in every module of experts of the plan.

    A plan without rules for modules gets them from the probe.

    Raises PlanError: no expert is sharded, or a sharded parameter belongs to no module with token dispatch.
    """
    rules = expert_rules(model, plan)
    sharded = {name for name, p in model.named_parameters() if _is_sharded(p, axis)}
    dispatched: set[str] = set()
    for name, module in model.named_modules():
        rule = rules.get(name)
        parameters = {f"{name}.{path}" for path, _ in module.named_parameters()}
        if rule is None or (rule.kind == "fused" and not parameters & sharded):
            continue
        if rule.count % plan.degree(axis):
            text = f"every rank needs equally many experts, and {plan.degree(axis)} does not divide the {rule.count} of {name!r}"
            raise PlanError(f"degrees.{axis}", plan.degree(axis), text)
        module.forward = Dispatch(module, name, rule, module.forward, axis)
        dispatched |= parameters
    # a pipeline stage may have none
    if not dispatched and stages_of(model) is None:
        text = f"the plan shards the parameters of no module of experts of this {type(model).__name__} along {axis!r}"
        raise PlanError(f"degrees.{axis}", plan.degree(axis), text, "1")
    if sharded - dispatched:
        name = min(sharded - dispatched)
        text = f"it is sharded along {axis!r}, but no rule of plan.experts matches a module that holds it"
        raise PlanError("parameters", name, text)


def _is_sharded(parameter: Any, axis: str) -> bool:
    layout = layout_of_dtensor(parameter)
    return is_shard(layout.states[layout.context.axes.index(axis)])


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
