"""Connects the tensor classes to the dispatcher, and catches ``autograd.Function.apply``, which bypasses it.

A global tensor carries the Python dispatch key, so functorch, C++ extensions, scripted functions and torch.compile raise
when they reach torch's dispatcher with it.  ``autograd.Function.apply`` never reaches it: it passes its arguments to
``forward`` and builds its own graph.  Its code is therefore replaced once, when the first global tensor or mesh parameter
is made; not the attribute, because models keep ``apply = MyFunction.apply`` from import time.  Calls without global
tensors run the original code.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright_dtensor._torch.core import pytree, replace_code
from meshwright_dtensor.dispatch import fallback
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.dispatch.methods import install_methods
from meshwright_dtensor.dispatch.parameter_calls import parameter_call
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.tensor.replaced import ReplacedTensor, current
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import Args, Kwargs
from meshwright_dtensor.trace.one_device import mark_function

_ROUTE = "_meshwright_route"
_NOT_OF_MODELS = ("meshwright_", "torch.distributed.tensor", "torch.distributed.fsdp", "torch.distributed._")

# the dispatcher itself, not a method that calls it: one Python frame less per call
GlobalTensor.__torch_function__ = classmethod(dispatch)  # type: ignore[assignment]
MeshParameter.__torch_function__ = classmethod(parameter_call)  # type: ignore[assignment]
install_methods()


def install() -> None:
    """Catch ``autograd.Function.apply`` and ``nn.Parameter``, which do not call ``__torch_function__``; idempotent."""
    function = torch.autograd.Function.__dict__["apply"].__func__
    if hasattr(function, _ROUTE):
        return
    new_parameter = replace_code(nn.Parameter.__new__, _new_parameter)

    def leaf_of_value(cls: Any, data: Any, requires_grad: bool) -> Any:
        # a new parameter in the memory of another: it is computed with outside of engines, as it is stored
        return new_parameter(cls, data.detach() if isinstance(data, MeshParameter) else data, requires_grad)

    setattr(nn.Parameter.__new__, _ROUTE, leaf_of_value)
    original = replace_code(function, _Host.__dict__["apply"])

    def route(cls: Any, args: Args, kwargs: Kwargs) -> Any:
        for a in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(a, ReplacedTensor):
                return route(cls, tuple(map(current, args)), {k: current(x) for k, x in kwargs.items()})
            if isinstance(a, Staged):
                raise UnsupportedError(
                    f"{cls.__name__}.apply is given a value that only some pipeline stages hold; pass x.full_tensor()"
                )
            if _is_hidden_from(cls, a) or (
                isinstance(a, (list, tuple, dict))
                and any(_is_hidden_from(cls, x) for x in pytree.tree_leaves(a))
            ):
                return fallback.run_function(cls, args, kwargs)
        result = original(cls, *args, **kwargs)
        if not cls.__module__.startswith(_NOT_OF_MODELS):
            mark_function(result)
        return result

    setattr(function, _ROUTE, route)


def _is_hidden_from(cls: Any, x: Any) -> bool:
    """Whether a Function must not see ``x``: torch's own Functions (DTensor's, FSDP's) know DTensors, so mesh parameters."""
    return isinstance(x, GlobalTensor) or (
        isinstance(x, MeshParameter) and not cls.__module__.startswith("torch.")
    )


def _new_parameter(cls, data=None, requires_grad=True):  # type: ignore[no-untyped-def]
    # donor of the code of nn.Parameter.__new__, which runs among the names of its module
    return Parameter.__new__._meshwright_route(cls, data, requires_grad)  # type: ignore[name-defined]  # noqa: F821


class _Host:
    """Donor of the code of ``apply``; ``__class__`` in it is the class of the function that receives the code."""

    def apply(cls, *args, **kwargs):  # type: ignore[no-untyped-def]
        return __class__.__dict__["apply"].__func__._meshwright_route(cls, args, kwargs)  # type: ignore[name-defined]
