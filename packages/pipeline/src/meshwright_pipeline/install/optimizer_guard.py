"""Guards optimizers over parameters of stages.

A step calls its closure equally often on every rank, or is an error on all of them: how often may depend on gradients, and a
rank sees only those of its own stages. An optimizer over parameters that are all on other ranks has nothing to step here.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.mesh import extremes

_STAGED = "_meshwright_staged"


class StageMark:
    """Marks a parameter of a stage.

    Args:
        group: the ranks of the pipeline axis.
        device: where their messages are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        # parameters may outlive their model
        self._group, self.device = weakref.ref(group), device

    def __reduce__(self) -> tuple[Any, ...]:
        return (bool, (True,))

    def agree(self, kind: type, calls: bool) -> None:
        """Check that all ranks call the closure now, or all end the step (collective).

        Raises UnsupportedError: ranks differ; on every rank.
        """
        group = self._group()
        # destroyed, and the model with it
        if group is None:
            return
        if extremes([int(calls)], group) == [(0, 1)]:
            raise UnsupportedError(
                f"{kind.__name__}.step(closure) on parameters of a pipelined model: ranks call the closure differently often, "
                f"since each sees the gradients of its own stages only. {_FIX}"
            )


_FIX = (
    "Take an optimizer that calls it equally often whatever the gradients are, or steps once for each backward pass (AdamW, SGD), "
    "or plan without pp"
)


class _CheckedClosure:
    """A closure whose calls are checked against those of the other ranks."""

    def __init__(self, closure: Callable[..., Any], mark: StageMark, kind: type) -> None:
        self.closure, self.mark, self.kind = closure, mark, kind

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.mark.agree(self.kind, True)
        return self.closure(*args, **kwargs)


def watch_steps(parameters: Iterable[nn.Parameter], group: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse steps of optimizers that cannot step these parameters of a stage."""
    mark = StageMark(group, device)
    for parameter in parameters:
        parameter.__dict__[_STAGED] = mark
    _register_hooks()
    allow_no_parameters()


@cache
def _register_hooks() -> None:
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


@cache
def allow_no_parameters() -> None:
    """From now on an optimizer over an empty list is one with an empty group.

    A user who selects parameters (those that are not frozen, or those of some layers) may find none on this rank and some on the
    others. Torch's error would come on this rank alone, and the others would wait for it.
    """
    init = torch.optim.Optimizer.__init__

    @wraps(init)
    def init_with_group(self: torch.optim.Optimizer, params: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(params, torch.Tensor):
            params = list(params) or [{"params": []}]
        init(self, params, *args, **kwargs)

    torch.optim.Optimizer.__init__ = init_with_group  # type: ignore[method-assign]


def _before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    kind = type(optimizer)
    needs = _needs_closure(kind)
    if not needs and len(args) < 2 and not kwargs:
        return None
    mark = _stage_mark(optimizer)
    if mark is None:
        return None
    if needs:
        raise UnsupportedError(
            f"{kind.__name__}.step(closure) on parameters of a pipelined model: how often it calls the closure depends on the "
            "gradients, and each rank sees the gradients of its own stages only. Ranks would call the model differently often "
            f"and wait for each other for ever. {_FIX}"
        )
    step: Any = inspect.unwrap(kind.step)
    if step.__module__.startswith("torch.optim."):
        # torch's own optimizers call it once
        return None
    bound = inspect.signature(step).bind_partial(*args, **kwargs)
    closure = bound.arguments.get("closure")
    if not callable(closure):
        return None
    bound.arguments["closure"] = _CheckedClosure(closure, mark, kind)
    return bound.args, bound.kwargs


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, _CheckedClosure):
            value.mark.agree(value.kind, False)


def _stage_mark(optimizer: torch.optim.Optimizer) -> StageMark | None:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return next((p.__dict__[_STAGED] for p in parameters if _STAGED in p.__dict__), None)


def _needs_closure(kind: type[torch.optim.Optimizer]) -> bool:
    """Whether a step needs a closure that computes the loss."""
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is closure.empty
