"""Optimizers that a stage cannot step: those that call the loss as often as what they see of the gradients says."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshwright_dtensor.errors import UnsupportedError

_STAGED = "_meshwright_staged"


def watch_steps(parameters: Iterable[nn.Parameter]) -> None:
    """From now on, a step of an optimizer that cannot step these parameters of a stage is refused."""
    for parameter in parameters:
        parameter.__dict__[_STAGED] = True
    _attend()


@cache
def _attend() -> None:
    register_optimizer_step_pre_hook(_before)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    kind = type(optimizer)
    if _needs_closure(kind) and any(
        _STAGED in parameter.__dict__ for group in optimizer.param_groups for parameter in group["params"]
    ):
        raise UnsupportedError(
            f"{kind.__name__}.step(closure) on parameters of a pipelined model: it calls the closure as often as the gradients "
            "that it sees say, and a rank of a pipeline sees those of its own stages only, so that ranks would call the model "
            "differently often and wait for each other for ever; take an optimizer that steps once for each backward pass "
            "(AdamW, SGD), or plan without pp"
        )


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a step cannot be taken without a function that computes the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
