"""The rules of a plan as a tree of module names, for the page: numbered modules with the same rules are one branch."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.utils.names import number_ranges

EVERY = "*"

_NUMBERS = re.compile(r"(?:[0-9]|\[[0-9-]+\])+")
_PIECE = re.compile(r"\[([0-9-]+)\]|([0-9])")
_ANY_NUMBER = re.compile(r"(?:\[0-9\])+")


@dataclass
class Branch:
    """A module pattern with its rules, and the patterns inside it.

    Args:
        name: last part of the pattern; several numbers are "0-3, 7".
        notes: (kind, text): "placement" of a parameter, "call" with its target states, "recompute", "experts".
        inside: last part -> pattern inside this one.
    """

    name: str
    notes: list[tuple[str, str]] = field(default_factory=list)
    inside: dict[str, Branch] = field(default_factory=dict)

    def at(self, pattern: str) -> Branch:
        """The branch of a dotted pattern, created if missing. Patterns of any number ("[0-9][0-9]") are "*"."""
        here = self
        for part in pattern.split(".") if pattern else ():
            name = EVERY if _ANY_NUMBER.fullmatch(part) else part
            here = here.inside.setdefault(name, Branch(name))
        return here

    def add(self, kind: str, text: str) -> None:
        """Add a rule, once."""
        if (kind, text) not in self.notes:
            self.notes.append((kind, text))


def tree_of(plan: ParallelPlan) -> Branch:
    """The rules of a plan as a tree of module name patterns."""
    root = Branch("model")
    for parameter in plan.parameters:
        states = ", ".join(f"{axis} {s}" for axis, s in parameter.placement.items() if s != "I")
        root.at(parameter.pattern).add("placement", states or "replicated")
    for call in plan.activations:
        inputs, outputs = ("; ".join(map(_states, states or ())) for states in (call.inputs, call.outputs))
        gives = f" gives {outputs}" if outputs else ""
        root.at(call.module).add("call", f"{call.call}: {inputs or 'any'}{gives}")
    for rule in plan.recompute:
        root.at(rule.pattern).add("recompute", f"recomputed in the backward pass ({rule.policy})")
    for experts in plan.experts:
        text = f"{experts.count} experts, {experts.count // plan.degree('ep')} a rank"
        root.at(experts.module).add("experts", text)
    return _folded(root)


def _folded(branch: Branch) -> Branch:
    """The branch with numbered modules of the same rules as one branch, at every level."""
    kept: list[Branch] = []
    numbered: list[tuple[Branch, set[int]]] = []
    for inner in map(_folded, branch.inside.values()):
        numbers = numbers_of(inner.name)
        same = next((n for b, n in numbered if (b.notes, b.inside) == (inner.notes, inner.inside)), None)
        if numbers and same is not None:
            same.update(numbers)
            continue
        if numbers:
            numbered.append((inner, numbers))
        kept.append(inner)
    for inner, numbers in numbered:
        inner.name = number_ranges(numbers)
    return Branch(branch.name, branch.notes, {inner.name: inner for inner in kept})


def numbers_of(pattern: str) -> set[int]:
    """The numbers that a pattern such as "1[0-3]" matches; none for other patterns."""
    if not _NUMBERS.fullmatch(pattern):
        return set()
    digits = [_digits(match[1]) if match[1] else match[2] for match in _PIECE.finditer(pattern)]
    return {int("".join(chosen)) for chosen in itertools.product(*digits)}


def _digits(text: str) -> str:
    """ "1-3" -> "123"."""
    spread = re.sub(r"([0-9])-([0-9])", lambda m: "".join(map(str, range(int(m[1]), int(m[2]) + 1))), text)
    return spread.replace("-", "")


def _states(states: object) -> str:
    named = states.items() if isinstance(states, dict) else ()
    return ", ".join(f"{axis} {state}" for axis, state in named) or "any"
