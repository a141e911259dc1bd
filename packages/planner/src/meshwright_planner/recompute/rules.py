"""The recompute rules of a request: which modules a policy or a pattern selects."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.blocks import Calls, repeated_blocks
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.utils.names import suggestion

POLICIES = ("full", "alternate", "selective")

Rules = tuple[RecomputeRule, ...]


def recompute_rules(model: nn.Module, wanted: str | None, calls: Calls | None = None) -> Rules:
    """The rules for `wanted`: a policy for all repeated blocks, or a pattern of module names.

    `calls`: see `repeated_blocks`.

    Raises UsageError: the model has no repeated block, or no module that matches the pattern.
    """
    if wanted is None:
        return ()
    if wanted in POLICIES:
        patterns = repeated_blocks(model, calls)
        if not patterns:
            names = [name for name, _ in model.named_children()]
            raise UsageError(
                f"recompute={wanted!r}: this {type(model).__name__} has no repeated blocks; name its modules instead, "
                f"recompute={names[0] if names else 'name'!r}"
            )
        return tuple(RecomputeRule(pattern=pattern, policy=wanted) for pattern in patterns)  # type: ignore[arg-type]
    rule = RecomputeRule(pattern=wanted)
    if not any(name and rule.matches(name) for name, _ in model.named_modules()):
        hint = suggestion(wanted, [*POLICIES, *(name for name, _ in model.named_modules() if name)])
        raise UsageError(
            f"recompute={wanted!r} is not 'full', 'alternate' or 'selective', and no module of this "
            f"{type(model).__name__} matches it{hint}"
        )
    return (rule,)


def in_words(rules: Iterable[RecomputeRule]) -> str:
    """ "full", or "selective and full in part" where rules name some of the blocks."""
    rules = list(rules)
    policies = [policy for policy in reversed(POLICIES) if any(rule.policy == policy for rule in rules)]
    return " and ".join(policies) + ("" if all(rule.pattern.endswith("*") for rule in rules) else " in part")


def rules_of(policies: Mapping[str, str], blocks: Sequence[str], patterns: Iterable[str]) -> Rules:
    """Rules that recompute the blocks in `policies` by their policies, and no other block.

    `patterns`: patterns that match all of `blocks`, used where all have the same policy.
    """
    if len(policies) == len(blocks) and len(set(policies.values())) == 1:
        (policy,) = set(policies.values())
        return tuple(RecomputeRule(pattern=pattern, policy=policy) for pattern in patterns)  # type: ignore[arg-type]
    return tuple(
        RecomputeRule(pattern=pattern, policy=policy)  # type: ignore[arg-type]
        for policy in POLICIES
        for pattern in name_patterns([name for name in blocks if policies.get(name) == policy])
    )


def name_patterns(names: Iterable[str]) -> list[str]:
    """Patterns that match exactly these names. Names that differ in the last digit share one: "layers.1[0-4]"."""
    digits_by_stem: dict[tuple[str, str], list[str]] = {}
    for name in names:
        number = re.fullmatch(r"(.*?)(\d)(\D*)", name)
        head, digit, tail = number.groups() if number else (name, "", "")
        digits_by_stem.setdefault((head, tail), []).append(digit)
    patterns = []
    for (head, tail), digits in digits_by_stem.items():
        row = "".join(sorted(digits))
        if len(digits) > 1:
            row = f"[{row[0]}-{row[-1]}]" if len(row) > 2 and row in "0123456789" else f"[{row}]"
        patterns.append(f"{head}{row}{tail}")
    return patterns
