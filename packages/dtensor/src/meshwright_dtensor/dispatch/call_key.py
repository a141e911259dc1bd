"""The key of a call: what its local program depends on, its function, layouts and static arguments."""

from __future__ import annotations

from collections.abc import Sequence
from types import FunctionType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.modes import transform_level
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor
from meshwright_dtensor.tensor.global_tensor import DetachedView, GlobalTensor
from meshwright_dtensor.tensor.staged import Staged, StagedOperand

Tensor = torch.Tensor
AS_THEY_ARE = frozenset(
    {int, type(None), str, torch.dtype, torch.device, torch.memory_format, torch.layout, type(Ellipsis)}
)
"""Types of arguments that stand for themselves in a key."""
BY_NAME = object()
"""Before the arguments that are given by name."""
_SEQUENCES = frozenset({tuple, list, torch.Size})
_TRUE, _FALSE = (bool, True), (bool, False)
_BOUNDS = frozenset({int, type(None)})


def freeze(a: Any, tensors: list[Any]) -> Any:
    """A hashable key for an argument; its tensors are appended to ``tensors`` in pytree order.

    Raises StagedOperand: the argument has a tensor whose own rules run the call.
    """
    t = type(a)
    if t is GlobalTensor:
        tensors.append(a)
        return a._layout
    if t in AS_THEY_ARE:
        return a
    if t is bool:
        # not itself: True is equal to 1
        return _TRUE if a else _FALSE
    if t is Tensor:
        tensors.append(a)
        return _form_of(a)
    if t is float:
        # -0.0 is not 0.0, and nan is nan
        return (t, a) if a and a == a else (t, a.hex())
    if t in _SEQUENCES:
        return _freeze_sequence(a, tensors)
    if t is slice:
        return _freeze_slice(a, tensors)
    if isinstance(a, Tensor):
        return _freeze_tensor(a, tensors)
    if t is dict:
        return tuple((k, freeze(v, tensors)) for k, v in a.items())
    # equal to nothing: derived again for every call
    return (t, a) if _can_be_kept(a) else object()


def _freeze_sequence(a: Any, tensors: list[Any]) -> Any:
    t = type(a)
    if AS_THEY_ARE.issuperset(map(type, a)):
        return (t, tuple(a))
    parts: list[Any] = [t]
    for x in a:
        parts.append(_freeze_slice(x, tensors) if type(x) is slice else freeze(x, tensors))
    return tuple(parts)


def _freeze_slice(a: slice, tensors: list[Any]) -> Any:
    bounds = (a.start, a.stop, a.step)
    if not _BOUNDS.issuperset(map(type, bounds)):
        bounds = tuple([freeze(x, tensors) for x in bounds])
    # not the bounds alone, which an index may have too
    return (slice, *bounds)


def _freeze_tensor(a: Tensor, tensors: list[Any]) -> Any:
    if isinstance(a, Staged):
        raise StagedOperand
    tensors.append(a)
    if isinstance(a, DetachedView):
        a.check_fresh()
        return ("view", a._layout)
    if isinstance(a, MeshParameter):
        return a._key
    if isinstance(a, DTensor):
        return ("dtensor", layout_of_dtensor(a))
    return _form_of(a)


def _form_of(a: Tensor) -> Any:
    # under a transform equal to nothing: run on gathered values, every time
    return (a.shape, a.dtype) if transform_level() is None else object()


def _can_be_kept(a: Any) -> bool:
    """Whether an argument can be part of a key. A closure that is kept would keep a model with it."""
    try:
        hash(a)
    except TypeError:
        return False
    return type(a) is not FunctionType or a.__closure__ is None


def repeats(tensors: Sequence[Any]) -> tuple[int, ...]:
    """`first_places`, empty if each tensor is given once: ``x * x`` is another program than ``x * y``."""
    count = len(tensors)
    if tensors[0] is not tensors[1] if count == 2 else len(set(map(id, tensors))) == count:
        return ()
    return first_places(tensors)


def first_places(tensors: Sequence[Any]) -> tuple[int, ...]:
    """For every tensor its first position among the arguments."""
    first: dict[int, int] = {}
    return tuple(first.setdefault(id(t), i) for i, t in enumerate(tensors))
