"""Which modules a request for recomputation means."""

from __future__ import annotations

from torch import nn

from meshwright_dtensor._names import did_you_mean
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import RecomputeRule

POLICIES = ("full", "alternate", "selective")


def recompute_rules(model: nn.Module, wanted: str | None) -> tuple[RecomputeRule, ...]:
    """The rules for `wanted`: a policy for every repeated block, or a pattern of module names.

    Raises:
        UsageError: the model has no repeated block, or no module that matches the pattern.
    """
    if wanted is None:
        return ()
    if wanted in POLICIES:
        patterns = repeated_blocks(model)
        if not patterns:
            names = [name for name, _ in model.named_children()]
            raise UsageError(
                f"recompute={wanted!r}: this {type(model).__name__} has no repeated blocks; name the modules instead, "
                f"recompute={names[0] if names else 'name'!r}"
            )
        return tuple(RecomputeRule(pattern=pattern, policy=wanted) for pattern in patterns)  # type: ignore[arg-type]
    rule = RecomputeRule(pattern=wanted)
    if not any(name and rule.matches(name) for name, _ in model.named_modules()):
        close = did_you_mean(wanted, [*POLICIES, *(name for name, _ in model.named_modules() if name)])
        raise UsageError(
            f"recompute={wanted!r} is none of 'full', 'alternate' and 'selective', and no module of this "
            f"{type(model).__name__} matches it" + (f"; did you mean {close!r}?" if close else "")
        )
    return (rule,)


def repeated_blocks(model: nn.Module) -> tuple[str, ...]:
    """Patterns of the blocks that repeat: the children of outermost lists in which one class of module occurs again."""
    found: list[str] = []
    for name, module in model.named_modules():
        if not name or any(name.startswith(pattern[:-1]) for pattern in found):
            continue
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = [type(child) for child in module if any(True for _ in child.children())]
        if len(kinds) > len(set(kinds)):
            found.append(f"{name}.*")
    return tuple(found)
