"""Which modules a request for recomputation means."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.blocks import has_forward
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.utils.names import suggestion

POLICIES = ("full", "alternate", "selective")


Calls = Collection[tuple[str, str]]
"""(module that calls, module that is called)."""


def recompute_rules(
    model: nn.Module, wanted: str | None, calls: Calls | None = None
) -> tuple[RecomputeRule, ...]:
    """The rules for `wanted`: a policy for every repeated block, or a pattern of module names.

    `calls`: see `repeated_blocks`.

    Raises:
        UsageError: the model has no repeated block, or no module that matches the pattern.
    """
    if wanted is None:
        return ()
    if wanted in POLICIES:
        patterns = repeated_blocks(model, calls)
        if not patterns:
            names = [name for name, _ in model.named_children()]
            raise UsageError(
                f"recompute={wanted!r}: this {type(model).__name__} has no repeated blocks; name the modules instead, "
                f"recompute={names[0] if names else 'name'!r}"
            )
        return tuple(RecomputeRule(pattern=pattern, policy=wanted) for pattern in patterns)  # type: ignore[arg-type]
    rule = RecomputeRule(pattern=wanted)
    if not any(name and rule.matches(name) for name, _ in model.named_modules()):
        hint = suggestion(wanted, [*POLICIES, *(name for name, _ in model.named_modules() if name)])
        raise UsageError(
            f"recompute={wanted!r} is none of 'full', 'alternate' and 'selective', and no module of this "
            f"{type(model).__name__} matches it{hint}"
        )
    return (rule,)


def in_words(rules: Iterable[RecomputeRule]) -> str:
    """ "full", or "selective and full in part" where rules name some of the blocks."""
    every = list(rules)
    policies = [policy for policy in reversed(POLICIES) if any(rule.policy == policy for rule in every)]
    return " and ".join(policies) + ("" if all(rule.pattern.endswith("*") for rule in every) else " in part")


def repeated_blocks(model: nn.Module, calls: Calls | None = None) -> tuple[str, ...]:
    """Patterns of the blocks that repeat: the children of outermost lists, or dicts, in which one class of module occurs again.

    Blocks that are not called themselves (a ModuleDict) never run, their parts do. `calls`: which modules call which, where
    that is known; else what has a forward is taken to be called.
    """
    called = None if calls is None else {name for _, name in calls}
    found: dict[str, str] = {}  # list -> pattern
    for name, module in model.named_modules():
        if not name or any(name.startswith(f"{outer}.") for outer in found):
            continue
        if not isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            continue
        kinds = [type(child) for child in module.children() if any(True for _ in child.children())]
        if len(kinds) > len(set(kinds)):
            whole = any(
                has_forward(child) if called is None else f"{name}.{key}" in called
                for key, child in module.named_children()
            )
            found[name] = f"{name}.*" if whole else f"{name}.*.*"
    return tuple(found.values())


def rules_of(
    policies: Mapping[str, str], blocks: Sequence[str], patterns: Iterable[str]
) -> tuple[RecomputeRule, ...]:
    """Rules by which each of `blocks` named in `policies` runs again by its policy, and no other one.

    `patterns`: what stands for all of `blocks`, taken where all of them run again alike.
    """
    if len(policies) == len(blocks) and len(set(policies.values())) == 1:
        (policy,) = set(policies.values())
        return tuple(RecomputeRule(pattern=pattern, policy=policy) for pattern in patterns)  # type: ignore[arg-type]
    return tuple(
        RecomputeRule(pattern=pattern, policy=policy)  # type: ignore[arg-type]
        for policy in POLICIES
        for pattern in spelt([name for name in blocks if policies.get(name) == policy])
    )


def spelt(names: Iterable[str]) -> list[str]:
    """Patterns that match these names and no other ones: those that differ in a last digit are one, "layers.1[0-4]"."""
    alike: dict[tuple[str, str], list[str]] = {}
    for name in names:
        number = re.fullmatch(r"(.*?)(\d)(\D*)", name)
        head, digit, tail = number.groups() if number else (name, "", "")
        alike.setdefault((head, tail), []).append(digit)
    return [f"{head}{_digits(sorted(digits))}{tail}" for (head, tail), digits in alike.items()]


def _digits(digits: Sequence[str]) -> str:
    if len(digits) == 1:
        return digits[0]
    row = "".join(digits)
    return f"[{row[0]}-{row[-1]}]" if len(row) > 2 and row in "0123456789" else f"[{row}]"
