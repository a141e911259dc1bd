"""Elementwise arithmetic on DTensors that lie alike, done on their local parts.

What optimizers do to parameters, gradients and states needs no communication and no sharding propagation.  Stock DTensor
propagates every function anew for each shape, over the product of what each mesh axis allows, which took 20 s at the first
step of a small model on two axes, and unwraps every call afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_from, dtensor_local, dtensor_spec, with_dtype

Tensor = torch.Tensor

_ALSO = frozenset(
    "zeros_like ones_like full_like empty_like copy_ zero zero_ copy fill_ masked_fill_ clamp_min clamp_max".split()
)
"""Elementwise, though torch does not tag them so."""
_NOT = frozenset("max min rrelu rrelu_".split())
"""With forms that are not elementwise, or random."""
_QUESTIONS = frozenset({"is_complex", "is_floating_point"})
_PLAIN_OPTIONS = frozenset(
    "out memory_format dtype alpha value rounding_mode weight min max fill_value".split()
)
"""Keywords that leave the result where the operands are."""


@cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends on the same element of each operand, and on no random numbers."""
    base = name.removeprefix("_foreach_")
    if base in _NOT:
        return False
    packet = getattr(torch.ops.aten, base, None)
    if base in _ALSO:
        return True
    if packet is None or base.startswith("__"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


@cache
def _quick_kind(func: Callable[..., Any]) -> str:
    """How :func:`fast_elementwise` may run a function: "", "question", "new" (it gives a new tensor) or "in place"."""
    name = getattr(func, "__name__", "")
    if name in _QUESTIONS:
        return "question"
    if name.startswith("_foreach_") or not is_elementwise(name):
        return ""
    return "in place" if name.endswith("_") else "new"


def fast_elementwise(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """:func:`on_local_parts` for what optimizers do thousands of times a step; NotImplemented where that must look closer.

    That is: tensors of one and the same spec object, as the gradient and the states of a parameter are, and numbers.  A new
    result is a stock DTensor.
    """
    kind = _quick_kind(func)
    if not kind or not args or torch.is_grad_enabled():
        return NotImplemented
    first = args[0]
    if kind == "question":
        return func(dtensor_local(first))
    if not isinstance(first, DTensor):
        return NotImplemented
    spec, order = dtensor_spec(first), _order_of(first)
    values = []
    for x in args:
        if isinstance(x, DTensor):
            if dtensor_spec(x) is not spec or _order_of(x) != order:
                return NotImplemented
            x = dtensor_local(x)
        elif isinstance(x, Tensor):
            return NotImplemented
        values.append(x)
    if kwargs:
        for key, x in kwargs.items():
            if key not in _PLAIN_OPTIONS or isinstance(x, Tensor):
                return NotImplemented
    for placement in spec.placements:
        if placement.is_partial():
            return NotImplemented
    result = func(*values, **(kwargs or {}))
    return first if kind == "in place" else _wrapped(result, first)


def on_local_parts(
    func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """``func`` on the local tensors, if it is elementwise and all operands lie alike; else NotImplemented.

    Operands of one element may be plain or replicated.  Results are stock DTensors that lie as the operands do; whoever
    calls gives them the class that they should have.  An in-place function returns its first argument.
    """
    if not is_elementwise(name) or not kwargs.keys() <= _PLAIN_OPTIONS:
        return NotImplemented
    if name.startswith("_foreach_"):
        return _foreach(func, name, args, kwargs)
    flat = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    first = _common(flat)
    out = kwargs.get("out")
    if first is None or (out is not None and (not isinstance(out, DTensor) or out.shape != first.shape)):
        return NotImplemented
    result = func(*map(_local, args), **{k: _local(x) for k, x in kwargs.items()})
    if name.endswith("_") or out is not None:
        return args[0] if out is None else out
    return _wrapped(result, first)


def _order_of(x: DTensor) -> Any:
    """The states of what lies in runs; None of all else. Two of one spec may hold their elements in different orders."""
    return getattr(x, "_order", None)


def _local(x: Any) -> Any:
    return dtensor_local(x) if isinstance(x, DTensor) else x


def same_specs(columns: Sequence[Sequence[Any]]) -> bool:
    """Whether the tensors of each row are DTensors with one and the same spec object, in the same order of elements."""
    for column in columns[1:]:
        firsts = columns[0]
        for x, first in zip(column, firsts, strict=True):
            if isinstance(x, Tensor) and not (
                isinstance(x, DTensor)
                and dtensor_spec(x) is dtensor_spec(first)
                and _order_of(x) == _order_of(first)
            ):
                return False
    return True


def _foreach(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The same for a list of tensors in the first place, and lists or single values in the others."""
    if (
        not args
        or not isinstance(args[0], (list, tuple))
        or any(isinstance(x, (list, tuple)) for x in kwargs.values())
    ):
        return NotImplemented
    columns = [a for a in args if isinstance(a, (list, tuple))]
    if any(len(c) != len(columns[0]) for c in columns):
        return NotImplemented
    single = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    firsts = columns[0]
    if torch.is_grad_enabled() or not all(isinstance(x, DTensor) for x in firsts):
        return NotImplemented
    quick = all(_is_number(x) for x in single) and same_specs(columns)
    if quick and any(
        p.is_partial()
        for spec in {id(s): s for s in map(dtensor_spec, firsts)}.values()
        for p in spec.placements
    ):
        return NotImplemented
    if not quick:
        for members in zip(*columns, strict=True):
            if _common([*(x for x in members if isinstance(x, Tensor)), *single]) is not members[0]:
                return NotImplemented
    values = [list(map(_local, a)) if isinstance(a, (list, tuple)) else _local(a) for a in args]
    result = func(*values, **{k: _local(x) for k, x in kwargs.items()})
    if name.endswith("_"):
        return result
    return type(result)(_wrapped(r, first) for r, first in zip(result, firsts, strict=True))


def _common(tensors: Sequence[Tensor]) -> DTensor | None:
    """The first of the tensors that all others lie like; None where some lie otherwise, or autograd would record them."""
    first: DTensor | None = None
    grad = torch.is_grad_enabled()
    for x in tensors:
        if grad and x.requires_grad:
            return None
        if isinstance(x, DTensor) and (first is None or x.ndim > first.ndim):
            first = x
    if first is None or any(p.is_partial() for p in dtensor_spec(first).placements):
        return None
    alike = all(
        x is first or (parts_correspond(first, x) if isinstance(x, DTensor) else _is_number(x, first.ndim))
        for x in tensors
    )
    return first if alike else None


def _is_number(x: Tensor, dims: int = 0) -> bool:
    """Whether it is one for all elements of a tensor of so many dims, whose shape it leaves as it is."""
    return type(x) is Tensor and x.dim() <= min(dims, 1) and x.numel() == 1


def parts_correspond(first: DTensor, x: DTensor) -> bool:
    """Whether each rank's part of `x` belongs to its part of `first`: one element to one, or one number to all."""
    spec, other = dtensor_spec(first), dtensor_spec(x)
    if other is spec or other.shape == spec.shape:
        same = other is spec or (other.placements == spec.placements and other.mesh == spec.mesh)
        return same and _order_of(x) == _order_of(first)
    return not x.dim() and all(p.is_replicate() for p in other.placements)


def assigns_under_mask(x: Any, mask: Any, value: Any) -> bool:
    """Whether ``x[mask] = value`` is a number for elements of each rank's part."""
    return (
        isinstance(x, DTensor)
        and isinstance(mask, DTensor)
        and mask.dtype is torch.bool
        and mask.shape == x.shape
        and parts_correspond(x, mask)
        and not isinstance(value, Tensor)
    )


def _wrapped(local: Tensor, first: DTensor) -> DTensor:
    spec = dtensor_spec(first)
    return dtensor_from(
        local, spec if local.dtype == spec.tensor_meta.dtype else with_dtype(spec, local.dtype)
    )
