"""The rules of a plan as a tree of module name patterns."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_dtensor.plan import ParallelPlan


@dataclass
class Branch:
    """A module pattern with its rules, and the patterns inside it.

    Args:
        name: last part of the pattern.
        notes: (kind, text): "placement" of a parameter, "call" with its target states, "recompute", "experts".
        inside: last part -> pattern inside this one.
    """

    name: str
    notes: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, Branch] = field(default_factory=dict)

    def at(self, pattern: str) -> Branch:
        """The branch of a dotted pattern, created if missing."""
        here = self
        for part in pattern.split(".") if pattern else ():
            here = here.inside.setdefault(part, Branch(part))
        return here


def tree_of(plan: ParallelPlan) -> Branch:
    """The tree of all patterns of a plan."""
    root = Branch("model")
    for parameter in plan.parameters:
        states = ", ".join(f"{axis} {s}" for axis, s in parameter.placement.items() if s != "I")
        root.at(parameter.pattern).notes.append(("placement", states or "replicated"))
    for call in plan.activations:
        inputs = [_states(s) for s in call.inputs]
        outputs = [_states(s) for s in call.outputs or ()]
        text = f"{call.function} #{call.occurrence}: {'; '.join(inputs) or 'any'}"
        root.at(call.module).notes.append(
            ("call", text + (f" gives {'; '.join(outputs)}" if outputs else ""))
        )
    for rule in plan.recompute:
        root.at(rule.pattern).notes.append(("recompute", f"recomputed in the backward pass ({rule.policy})"))
    for experts in plan.experts:
        text = f"{experts.count} experts, {experts.count // plan.degree('ep')} a rank"
        root.at(experts.module).notes.append(("experts", text))
    return root


def _states(states: object) -> str:
    return (
        "any" if not isinstance(states, dict) else ", ".join(f"{a} {s}" for a, s in states.items()) or "any"
    )
