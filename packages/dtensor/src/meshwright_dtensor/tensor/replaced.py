"""Tensors that a plan has replaced by tensors over a mesh, where they are still referenced.

A model may hold a parameter outside of its modules' parameters: in a list, a closure, a ``functools.partial``, a module in a
plain list.  On one device all of these are one tensor.  So a replaced tensor stands for the one in its place: every function
of it runs on that one.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs


class ReplacedTensor(Staged, torch.Tensor):
    """A tensor without values that stands for another."""

    _replacement: torch.Tensor

    @classmethod
    def __torch_function__(
        cls, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        first, name = args[0] if args else None, getattr(func, "__name__", "")
        args, kwargs = pytree.tree_map_only(ReplacedTensor, current, (args, kwargs or {}))
        if isinstance(first, ReplacedTensor):
            # the class of the replacement may have its own attributes and methods
            attribute = getattr(getattr(func, "__self__", None), "__name__", "")
            if name == "__get__":
                return getattr(args[0], attribute)
            if name in ("__set__", "__delete__"):
                return setattr(args[0], attribute, args[1]) if args[1:] else delattr(args[0], attribute)
            if getattr(torch.Tensor, name, None) is func:
                return getattr(args[0], name)(*args[1:], **kwargs)
        return func(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(current(self), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(current(self), memo)


class ReplacedParameter(ReplacedTensor, nn.Parameter):
    """The same of a parameter."""


def current(x: Any) -> Any:
    """The tensor for which a replaced tensor stands; anything else as it is."""
    while isinstance(x, ReplacedTensor):
        x = x._replacement
    return x


def replace_tensor(old: torch.Tensor, new: torch.Tensor) -> None:
    """Let `old`, wherever it is referenced, stand for `new`; its memory is freed. Tensor subclasses are left as they are."""
    if type(old) in (torch.Tensor, nn.Parameter) and not old.is_inference():
        old.grad = None
        old.data = old.data.new_empty(0)
        old.__dict__["_replacement"] = new
        old.__class__ = ReplacedParameter if type(old) is nn.Parameter else ReplacedTensor
    elif isinstance(old, ReplacedTensor):
        old.__dict__["_replacement"] = new
