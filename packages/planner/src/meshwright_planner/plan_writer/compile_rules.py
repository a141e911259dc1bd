"""The compile rules of a request: which modules run compiled."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.blocks import repeated_blocks
from meshwright_dtensor.plan import CompileRule
from meshwright_dtensor.strategy.plan_request import AUTO
from meshwright_dtensor.utils.names import suggestion


def compile_rules(model: nn.Module, wanted: bool | str | Sequence[str] | None) -> tuple[CompileRule, ...]:
    """The rules for `wanted`: True for all repeated blocks, else patterns of module names.

    Raises UsageError: the model has no repeated block, or no module that a pattern matches.
    """
    if wanted is None or wanted is False:
        return ()
    names = [name for name, _ in model.named_modules() if name]
    if wanted is True:
        patterns: Sequence[str] = repeated_blocks(model)
        if not patterns:
            raise UsageError(
                f"compile=True: this {type(model).__name__} has no repeated blocks; name its modules instead, "
                f"compile={names[0] if names else 'name'!r}"
            )
    else:
        patterns = (wanted,) if isinstance(wanted, str) else tuple(wanted)
    rules = tuple(CompileRule(pattern=pattern) for pattern in patterns)
    for rule in rules:
        if not any(map(rule.matches, names)):
            hint = suggestion(rule.pattern, [*names, AUTO])
            raise UsageError(
                f"compile={rule.pattern!r} matches no module of this {type(model).__name__}{hint}; give a pattern of its module "
                "names, True for its repeated blocks, or 'auto' (by itself) for those where it saves time"
            )
    return rules
