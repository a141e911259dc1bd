"""Optimizers on a stage whose steps call the loss: as often on every rank, or an error on all of them.

How often a step calls its closure may depend on gradients, of which a rank of a pipeline sees those of its own stages only.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright_dtensor.errors import UnsupportedError

_STAGED = "_meshwright_staged"


class Staged:
    """Marks a parameter of a stage.

    Args:
        group: the ranks of the pipeline's axis.
        device: where its messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self.device = weakref.ref(group), device  # parameters outlive models

    def __reduce__(self) -> tuple[Any, ...]:
        return (bool, (True,))

    def agree(self, kind: type, calls: bool) -> None:
        """Tell the other ranks whether the closure is called now, or the step ends (collective).

        Raises:
            UnsupportedError: ranks differ; on every rank.
        """
        group = self._group()
        if group is None:  # it has been ended, and the model with it
            return
        told = torch.tensor([calls, not calls], dtype=torch.int64, device=self.device)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
        if told.all():
            raise UnsupportedError(
                f"{kind.__name__}.step(closure) on parameters of a pipelined model: ranks call the closure differently often, "
                f"since each sees the gradients of its own stages only. {_FIX}"
            )


_FIX = (
    "Take an optimizer that calls it equally often whatever the gradients are, or steps once for each backward pass (AdamW, SGD), "
    "or plan without pp"
)


class _Asked:
    """A closure of whose calls the other ranks are told."""

    def __init__(self, closure: Callable[..., Any], staged: Staged, kind: type) -> None:
        self.closure, self.staged, self.kind = closure, staged, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.staged.agree(self.kind, True)
        return self.closure(*args, **kwargs)


def watch_steps(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """From now on, a step of an optimizer that cannot step these parameters of a stage is refused."""
    mark = Staged(group, device)
    for parameter in parameters:
        parameter.__dict__[_STAGED] = mark
    _attend()


@cache
def _attend() -> None:
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    kind = type(optimizer)
    needs = _needs_closure(kind)
    if not needs and len(args) < 2 and not kwargs:
        return None
    staged = _staged(optimizer)
    if staged is None:
        return None
    if needs:
        raise UnsupportedError(
            f"{kind.__name__}.step(closure) on parameters of a pipelined model: it calls the closure as often as the gradients "
            "that it sees say, and a rank of a pipeline sees those of its own stages only, so that ranks would call the model "
            f"differently often and wait for each other for ever. {_FIX}"
        )
    step: Any = inspect.unwrap(kind.step)
    if step.__module__.startswith("torch.optim."):
        return None  # those of torch call it once
    given = inspect.signature(step).bind_partial(*args, **kwargs)
    closure = given.arguments.get("closure")
    if not callable(closure):
        return None
    given.arguments["closure"] = _Asked(closure, staged, kind)
    return given.args, given.kwargs


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for given in (*args, *kwargs.values()):
        if isinstance(given, _Asked):
            given.staged.agree(given.kind, False)


def _staged(optimizer: torch.optim.Optimizer) -> Staged | None:
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((parameter.__dict__[_STAGED] for parameter in every if _STAGED in parameter.__dict__), None)


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a step cannot be taken without a function that computes the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
