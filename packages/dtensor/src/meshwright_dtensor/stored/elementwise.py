"""Elementwise functions on DTensors with the same placements, run on their local tensors.

The arithmetic of optimizers needs no communication and no sharding propagation.  Stock DTensor propagates every function
for each shape, over all combinations of placements: 20 s at the first step of a small model on two axes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import dtensor_like, dtensor_local, dtensor_spec
from meshwright_dtensor.trace.function_kinds import Function

Tensor = torch.Tensor

_UNTAGGED = frozenset(
    "zeros_like ones_like full_like empty_like copy_ zero zero_ copy fill_ masked_fill_ clamp_min clamp_max".split()
)
"""Elementwise functions that torch does not tag as pointwise."""
_NOT_ELEMENTWISE = frozenset("max min rrelu rrelu_".split())
"""Tagged functions that have forms which are not elementwise, or are random."""
_QUERIES = frozenset({"is_complex", "is_floating_point"})
_PLAIN_OPTIONS = frozenset(
    "out memory_format dtype alpha value rounding_mode weight min max fill_value".split()
)
"""Keywords with which the result keeps the placements of the operands."""


@cache
def is_elementwise(name: str) -> bool:
    """Whether each element of the result depends on the same element of each operand, and on no random numbers."""
    base = name.removeprefix("_foreach_")
    if base in _NOT_ELEMENTWISE:
        return False
    if base in _UNTAGGED:
        return True
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or base.startswith("__"):
        return False
    return any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads())


@cache
def _quick_kind(func: Function) -> str:
    """How :func:`fast_elementwise` runs a function: "", "query", "new" (a new tensor) or "in place"."""
    name = getattr(func, "__name__", "")
    if name in _QUERIES:
        return "query"
    if name.startswith("_foreach_") or not is_elementwise(name):
        return ""
    return "in place" if name.endswith("_") else "new"


def fast_elementwise(func: Function, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Any:
    """The fast path of :func:`on_local_parts` for the calls that optimizers make thousands of times a step.

    The operands are numbers and tensors with the same spec object, as a parameter's gradient and states are; NotImplemented
    for others.  A new result is a stock DTensor.
    """
    kind = _quick_kind(func)
    if not kind or not args or torch.is_grad_enabled():
        return NotImplemented
    first = args[0]
    if kind == "query":
        return func(dtensor_local(first))
    if not isinstance(first, DTensor):
        return NotImplemented
    spec, order = dtensor_spec(first), order_of(first)
    values = []
    for x in args:
        if isinstance(x, DTensor):
            if dtensor_spec(x) is not spec or order_of(x) != order:
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
    # parts of a result that is no tensor, or several, are not the whole
    if not isinstance(result, Tensor):
        return NotImplemented
    return first if kind == "in place" else dtensor_like(result, first)


def on_local_parts(func: Function, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func`` on the local tensors, if it is elementwise and all operands have the same placements; else NotImplemented.

    Operands of one element may be plain or replicated.  Results are stock DTensors with the placements of the operands.  An
    in-place function returns its first argument.
    """
    if not is_elementwise(name) or not kwargs.keys() <= _PLAIN_OPTIONS:
        return NotImplemented
    if name.startswith("_foreach_"):
        return _foreach(func, name, args, kwargs)
    flat = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    first = _reference(flat)
    out = kwargs.get("out")
    if first is None or (out is not None and (not isinstance(out, DTensor) or out.shape != first.shape)):
        return NotImplemented
    result = func(*map(_local, args), **{k: _local(x) for k, x in kwargs.items()})
    if not isinstance(result, Tensor):
        return NotImplemented
    if name.endswith("_") or out is not None:
        return args[0] if out is None else out
    return dtensor_like(result, first)


def order_of(x: Tensor) -> Any:
    """The states of a permuted tensor, else None: two tensors of one spec may differ in the order of their elements."""
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
                and order_of(x) == order_of(first)
            ):
                return False
    return True


def _foreach(func: Function, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """``func`` of a list of tensors, and of lists or single values."""
    if torch.is_grad_enabled() or any(_is_list(x) for x in kwargs.values()):
        return NotImplemented
    if not args or not _is_list(args[0]) or not all(isinstance(x, DTensor) for x in args[0]):
        return NotImplemented
    columns = [a for a in args if _is_list(a)]
    single = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    if any(len(c) != len(columns[0]) for c in columns) or not _have_same_placements(columns, single):
        return NotImplemented
    values = [list(map(_local, a)) if _is_list(a) else _local(a) for a in args]
    result = func(*values, **{k: _local(x) for k, x in kwargs.items()})
    if name.endswith("_"):
        return result
    return type(result)(dtensor_like(r, first) for r, first in zip(result, columns[0], strict=True))


def _is_list(x: Any) -> bool:
    return isinstance(x, (list, tuple))


def _have_same_placements(columns: Sequence[Sequence[Any]], single: Sequence[Tensor]) -> bool:
    """Whether the tensors of each row, and the single ones, correspond part to part, without partial values."""
    if same_specs(columns) and all(map(_is_number, single)):
        specs = {id(spec): spec for spec in map(dtensor_spec, columns[0])}.values()
        return not any(p.is_partial() for spec in specs for p in spec.placements)
    return all(
        _reference([*(x for x in row if isinstance(x, Tensor)), *single]) is row[0]
        for row in zip(*columns, strict=True)
    )


def _reference(tensors: Sequence[Tensor]) -> DTensor | None:
    """The tensor whose placements all others have; None if they differ, or if autograd would record the call."""
    first: DTensor | None = None
    grad = torch.is_grad_enabled()
    for x in tensors:
        if grad and x.requires_grad:
            return None
        if isinstance(x, DTensor) and (first is None or x.ndim > first.ndim):
            first = x
    if first is None or any(p.is_partial() for p in dtensor_spec(first).placements):
        return None
    same = all(
        x is first or (parts_correspond(first, x) if isinstance(x, DTensor) else _is_number(x, first.ndim))
        for x in tensors
    )
    return first if same else None


def _is_number(x: Tensor, dims: int = 0) -> bool:
    """Whether ``x`` is one plain number that broadcasts to a tensor of ``dims`` dims without changing its shape."""
    return type(x) is Tensor and x.dim() <= min(dims, 1) and x.numel() == 1


def parts_correspond(first: DTensor, x: DTensor) -> bool:
    """Whether each rank's part of `x` corresponds to its part of `first`, element by element or as one number."""
    spec, other = dtensor_spec(first), dtensor_spec(x)
    if other is spec or other.shape == spec.shape:
        same = other is spec or (other.placements == spec.placements and other.mesh == spec.mesh)
        return same and order_of(x) == order_of(first)
    return not x.dim() and all(p.is_replicate() for p in other.placements)


def assigns_under_mask(x: Any, mask: Any, value: Any) -> bool:
    """Whether ``x[mask] = value`` assigns a number, with a mask that is sharded as ``x``."""
    return (
        isinstance(x, DTensor)
        and isinstance(mask, DTensor)
        and mask.dtype is torch.bool
        and mask.shape == x.shape
        and parts_correspond(x, mask)
        and not isinstance(value, Tensor)
    )
