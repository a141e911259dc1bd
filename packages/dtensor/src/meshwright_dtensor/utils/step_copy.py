"""A copy of an optimizer, whose step is taken in the place of that of the user's optimizer."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch


def step_copy(optimizer: torch.optim.Optimizer, state: MutableMapping[Any, Any]) -> torch.optim.Optimizer:
    """A copy for one step: `state` is its own, and everything else that of the optimizer. Its groups are for the caller to give."""
    copied: torch.optim.Optimizer = object.__new__(type(optimizer))
    copied.__dict__.update(optimizer.__dict__)
    copied.state = state  # type: ignore[assignment]
    return copied
