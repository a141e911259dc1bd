"""What modules keep in themselves, buffers and attributes, as values that can be compared: what a forward writes shows."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import OWN_PARTS, tensors_in

Place = tuple[str, str]
"""The path of a module, and the name of what it keeps."""
State = dict[Place, Any]

LARGE = 1 << 20
"""Tensors of more elements are taken to stay as they are."""

_DEEP = 4
"""How deep containers and objects are looked into."""

_LISTS = (list, tuple, deque)
_OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module)


class Values:
    """The values of a tensor at one time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Values) or not self.like(other):
            return False
        one, two = self.tensor, other.tensor
        return bool(((one == two) | ((one != one) & (two != two))).all())

    __hash__ = None  # type: ignore[assignment]

    def like(self, other: Values) -> bool:
        """Whether they have one shape and dtype."""
        return self.tensor.shape == other.tensor.shape and self.tensor.dtype == other.tensor.dtype


def state_of(parts: Iterable[tuple[str, nn.Module]]) -> State:
    """What modules keep, by place; parts are left out."""
    seen: dict[int, Any] = {}
    found: State = {}
    for path, part in parts:
        parameters, buffers = tensors_in(part)
        own = {name: value for name, value in part.__dict__.items() if name not in OWN_PARTS}
        for name, value in (own | parameters | buffers).items():
            found[path, name] = _kept(value, 0, seen)
    return found


def changed(before: State, after: State) -> list[Place]:
    """The places where two states differ."""
    every = dict.fromkeys((*before, *after))
    return [at for at in every if at not in before or at not in after or before[at] != after[at]]


def _kept(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """What tells a value from what it may become."""
    if isinstance(value, torch.Tensor):
        ordinary = not value.is_meta and value.numel() <= LARGE
        return Values(value) if ordinary else (torch.Tensor, value.shape)
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value), value
    if isinstance(value, (float, complex)):
        return type(value), repr(value)  # one that is no number is like itself
    if hasattr(value, "tobytes") and getattr(value, "nbytes", LARGE) < 8 * LARGE:  # of numpy
        return type(value), getattr(value, "shape", None), value.tobytes()
    if depth == _DEEP or isinstance(value, _OPAQUE):
        return type(value)
    if id(value) not in seen:
        seen[id(value)] = type(value)  # what holds itself
        seen[id(value)] = _looked_into(value, depth, seen)
    return seen[id(value)]


def _looked_into(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    if isinstance(value, _LISTS):
        return type(value), *(_kept(one, depth + 1, seen) for one in value)
    if isinstance(value, (set, frozenset)):
        return type(value), len(value)
    entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if not isinstance(entries, Mapping):
        return type(value)
    return type(value), *((_kept(k, depth + 1, seen), _kept(v, depth + 1, seen)) for k, v in entries.items())
