"""Methods and operators of global tensors that call the dispatcher without the way through torch.

For each call of a method on a class with ``__torch_function__``, torch parses the arguments, collects the classes that ask for
the call, and builds new arguments. Where the program of a call is known, none of that changes the result. So the methods that
models call most find it themselves. Any other call is made by torch's own method: the first of its kind, whose arguments torch
checks, and all calls while a function mode is on or torch functions are off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch

from meshwright_dtensor._torch.modes import classes_are_asked, function_mode_is_on
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor
from meshwright_dtensor.trace.function_kinds import Function

Tensor = torch.Tensor

METHODS = (
    "abs add addmm all amax amin any argmax argmin baddbmm bfloat16 bmm bool chunk clamp clone contiguous cos cumsum div double "
    "exp expand expand_as flatten float gather ge gt half index_select int le log logical_not long lt masked_fill matmul max "
    "mean min mm movedim mul ne neg permute pow prod reciprocal relu repeat reshape roll rsqrt select sigmoid sin softmax sqrt "
    "square squeeze sub sum tanh to transpose tril triu type_as unbind unsqueeze var view view_as"
).split()
"""Methods that models call most. torch gives the method itself to ``__torch_function__``, with the arguments as they are."""

OPERATORS: Mapping[str, Function] = MappingProxyType(
    {
        **dict.fromkeys(("__add__", "__radd__"), Tensor.add),
        **dict.fromkeys(("__mul__", "__rmul__"), Tensor.mul),
        "__sub__": Tensor.sub,
        "__rsub__": Tensor.__rsub__,
        "__truediv__": Tensor.div,
        "__pow__": Tensor.__pow__,
        "__matmul__": Tensor.matmul,
        "__getitem__": Tensor.__getitem__,
        "__lt__": Tensor.lt,
        "__le__": Tensor.le,
        "__gt__": Tensor.gt,
        "__ge__": Tensor.ge,
        "__eq__": Tensor.__eq__,
        "__ne__": Tensor.ne,
    }
)
"""Operators of two operands -> the function that torch gives to ``__torch_function__`` for them."""


def install_methods() -> None:
    """Give `GlobalTensor` the methods; a `DetachedView`, which is checked at each use, keeps torch's own."""
    methods = {
        **{name: _method(getattr(Tensor, name), name) for name in METHODS},
        **{name: _operator(func, name) for name, func in OPERATORS.items()},
        "__neg__": _method(Tensor.neg, "__neg__"),
    }
    for name, method in methods.items():
        setattr(GlobalTensor, name, method)
        setattr(DetachedView, name, getattr(Tensor, name))
    for name in ("__add__", "__mul__"):
        setattr(MeshParameter, name, _operator_of_parameters(OPERATORS[name], name))


def _method(func: Function, name: str) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if function_mode_is_on() or not classes_are_asked():
            return func(self, *args, **kwargs)
        return dispatch(GlobalTensor, func, (), (self, *args), kwargs, func)

    return _named(call, name)


def _operator(func: Function, name: str) -> Callable[..., Any]:
    # torch's own returns NotImplemented for operands that it does not know
    torch_method: Function = getattr(Tensor, name)

    def call(self: Any, other: Any) -> Any:
        if function_mode_is_on() or not classes_are_asked():
            return torch_method(self, other)
        return dispatch(GlobalTensor, func, (), (self, other), None, torch_method)

    return _named(call, name)


def _operator_of_parameters(func: Function, name: str) -> Callable[..., Any]:
    torch_method: Function = getattr(Tensor, name)

    def call(self: Any, other: Any) -> Any:
        # as `parameter_call` does
        computes = type(self) is MeshParameter and type(other) is GlobalTensor and torch.is_grad_enabled()
        if not computes or function_mode_is_on() or not classes_are_asked():
            return torch_method(self, other)
        return dispatch(MeshParameter, func, (), (self, other), None, torch_method)

    return _named(call, name)


def _named(method: Callable[..., Any], name: str) -> Callable[..., Any]:
    method.__name__, method.__qualname__ = name, f"{GlobalTensor.__name__}.{name}"
    method.__doc__ = getattr(Tensor, name).__doc__
    return method
