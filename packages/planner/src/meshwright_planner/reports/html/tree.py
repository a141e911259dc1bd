"""What a plan says of modules, as a tree of name patterns."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright_dtensor.plan import ParallelPlan


@dataclass
class Branch:
    """A module pattern: what is said of it, and what is inside.

    Args:
        name: last part of the pattern.
        notes: (kind, text): "placement" of a parameter, "call" with its target states, "stage", "recompute", "experts".
        inside: parts of the pattern that follow.
    """

    name: str
    notes: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, Branch] = field(default_factory=dict)

    def at(self, pattern: str) -> Branch:
        """The branch of a dotted pattern, made where it is not there."""
        here = self
        for part in pattern.split(".") if pattern else ():
            here = here.inside.setdefault(part, Branch(part))
        return here


def tree_of(plan: ParallelPlan) -> Branch:
    """The tree of everything that a plan names."""
    root = Branch("model")
    for rule in plan.parameters:
        states = ", ".join(f"{axis} {state}" for axis, state in rule.placement.items() if state != "I")
        root.at(rule.pattern).notes.append(("placement", states or "replicated"))
    for call in plan.activations:
        inputs = [_states(s) for s in call.inputs]
        outputs = [_states(s) for s in call.outputs or ()]
        text = f"{call.function} #{call.occurrence}: {'; '.join(inputs) or 'any'}"
        root.at(call.module).notes.append(
            ("call", text + (f" gives {'; '.join(outputs)}" if outputs else ""))
        )
    for again in plan.recompute:
        root.at(again.pattern).notes.append(
            ("recompute", f"computed again in the backward pass ({again.policy})")
        )
    for experts in plan.experts:
        text = f"{experts.count} experts, {experts.count // plan.degree('ep')} a rank"
        root.at(experts.module).notes.append(("experts", text))
    return root


def _states(states: object) -> str:
    return (
        "any" if not isinstance(states, dict) else ", ".join(f"{a} {s}" for a, s in states.items()) or "any"
    )
