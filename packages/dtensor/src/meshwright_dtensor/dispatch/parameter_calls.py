"""Torch functions on mesh parameters: global tensor computations, writes to the stored value, optimizer arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_local
from meshwright_dtensor.dispatch.dispatch import dispatch
from meshwright_dtensor.dispatch.parameter_view import viewed_or_written
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.stored.elementwise import fast_elementwise
from meshwright_dtensor.stored.functions import optimizer_call
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import with_order_of
from meshwright_dtensor.stored.writes import MeshView
from meshwright_dtensor.tensor.compute_copy import ComputeCopy, computing, touch
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.tensor.staged import Staged
from meshwright_dtensor.trace.function_kinds import (
    FILLS,
    VIEW_GETTERS,
    Args,
    Function,
    Kwargs,
    is_in_place,
    kind_of,
)

Tensor = torch.Tensor

_STOCK = frozenset(
    "__set__ __delete__ size dim stride numel is_floating_point is_complex detach is_contiguous __hash__ __repr__ "
    "zeros_like ones_like full_like empty_like untyped_storage element_size __len__ redistribute data_ptr "
    "is_shared share_memory_ nelement ndimension".split()
)
"""Functions that ask about or change the parameter itself, or make optimizer state like it: stock DTensor runs them."""

_OF_VALUES = frozenset({(MeshParameter,), (MeshParameter, GlobalTensor), (GlobalTensor, MeshParameter)})


@cache
def _computes(func: Function) -> bool:
    """Whether a function computes a new value, whatever its arguments are."""
    name = getattr(func, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    return not (_is_of_parameters(name) or name == "__get__" or kind_of(func) or writes)


def _is_of_parameters(name: str) -> bool:
    """Whether a function of this name asks about parameters, or is the arithmetic of an optimizer."""
    return name in _STOCK or name.startswith(("_foreach", "_fused"))


def _computes_value(func: Function, types: Any, kwargs: Kwargs | None) -> bool:
    return not kwargs and types in _OF_VALUES and _computes(func) and torch.is_grad_enabled()


def parameter_call(
    cls: type, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None
) -> Any:
    """``__torch_function__`` of mesh parameters."""
    if _computes_value(func, types, kwargs):
        # the shortest way for what models do most
        return dispatch(cls, func, types, args)
    copy = _copy_of(args[0]) if args else None
    # while a forward runs, it may need the compute copy
    if copy is None or not copy.computing:
        result = fast_elementwise(func, args, kwargs)
        if result is not NotImplemented:
            return mesh_value(with_order_of(args[0], result))
    if any(issubclass(t, (MeshView, Staged)) for t in types):
        # they have rules of their own
        return NotImplemented
    name, kind = getattr(func, "__name__", ""), kind_of(func)
    # torch.nn.init names it
    written: Any = args[0] if args else (kwargs or {}).get("tensor")
    copy = _copy_of(written)
    if copy is not None and (kind == "init" or is_in_place(name)):
        # the write goes to the stored value
        written.compute_with(None)
        try:
            return parameter_call(cls, func, types, args, kwargs)
        finally:
            written.compute_with(copy)
    if kind == "init":
        # its own no_grad starts after this call
        with torch.no_grad():
            return dispatch(cls, func, types, args, kwargs)
    if kind:
        result = viewed_or_written(func, types, args, kwargs or {})
        if result is not NotImplemented:
            return result
    if _is_computation(func, name, args, kwargs):
        return dispatch(cls, func, types, args, kwargs)
    return _optimizer_function(func, name, args, kwargs)


def _copy_of(x: Any) -> ComputeCopy | None:
    return x._copy if isinstance(x, MeshParameter) else None


def _is_computation(func: Function, name: str, args: Sequence[Any], kwargs: Kwargs | None) -> bool:
    """Whether the call is a global tensor computation, not one of an optimizer or about the parameter itself."""
    if _is_of_parameters(name):
        return False
    if kwargs and isinstance(kwargs.get("out"), DTensor):
        return False
    if name == "__get__":
        return getattr(func, "__self__", None) in VIEW_GETTERS
    if name.endswith("_") and not name.endswith("__"):
        return name in FILLS
    if torch.is_grad_enabled():
        return True
    operands = [*args, *(kwargs or {}).values()]
    return any(isinstance(a, Tensor) and not isinstance(a, DTensor) for a in operands) or computing(operands)


def _optimizer_function(func: Function, name: str, args: Args, kwargs: Kwargs | None) -> Any:
    result = optimizer_call(func, args, kwargs)
    # torch counts no versions for _foreach_add_ and _fused_adamw_
    if name.startswith("_f") and name.endswith("_"):
        touch(args[0] if args else tuple((kwargs or {}).values())[:1])
    elif name == "__set__" and getattr(func, "__self__", None) is torch.Tensor.requires_grad:
        dtensor_local(args[0]).requires_grad = args[1]
        if args[0]._copy is not None:
            args[0]._copy.follow(args[1])
    return result
