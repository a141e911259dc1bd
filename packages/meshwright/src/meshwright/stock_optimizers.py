"""Optimizers that `verify` and trials step with, by the names of `plan(optimizer=...)`. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from meshwright_dtensor.errors import UsageError


def _stock(name: str, **settings: float) -> Callable[[Iterable[Any]], Any]:
    """Makes an optimizer of torch with these settings."""

    def make(parameters: Iterable[Any]) -> Any:
        import torch

        return getattr(torch.optim, name)(parameters, **settings)

    return make


# At its usual epsilon Adam turns gradients that are rounding noise into whole steps, and two right runs part. The rate is
# small, so that what noise there is in the parameters stays below the tolerance of the gradients of later steps.
OPTIMIZERS: Mapping[str, Callable[[Iterable[Any]], Any]] = MappingProxyType(
    {
        "sgd": _stock("SGD", lr=0.05),
        "sgd-momentum": _stock("SGD", lr=0.05, momentum=0.9),
        "adam": _stock("Adam", lr=1e-4, eps=1e-5),
        "adamw": _stock("AdamW", lr=1e-4, eps=1e-5),
    }
)
"""Name, as in `plan(optimizer=...)` -> factory. Plans know more names, of optimizers that users bring."""

FOR_OTHERS = "adamw"
"""Trials step plans for any other optimizer with this one."""

HELP = "adamw, adam, sgd or sgd-momentum."
"""Of the option --optimizer of a command that steps."""


def check_stepped(command: str, optimizer: str, otherwise: str) -> None:
    """Check that a command can step with an optimizer. Raises UsageError: `otherwise` says what to do with another."""
    if optimizer not in OPTIMIZERS:
        raise UsageError(
            f"--optimizer {optimizer}: {command} steps with {', '.join(OPTIMIZERS)}; give one of these, or {otherwise}"
        )
