"""Snapshots of buffers and attributes of modules as comparable values, to find out what a forward writes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import is_framework_attribute, memory_of, tensors_in
from meshwright_pipeline.pytrees import is_value, tensors_within

Place = tuple[str, str]
"""The path of a module, and the name of its buffer or attribute."""

State = dict[Place, Any]

LARGE = 1 << 20
"""Tensors with more elements are assumed not to change."""

_DEEP = 4
"""Nesting depth up to which containers and objects are compared."""

_PRINTED = (float, complex, range, slice, torch.dtype, torch.device)
"""Types whose text tells the whole value."""

_HASHED = (bool, int, float, str, bytes)
_LISTS = (list, tuple, deque)
_OPAQUE = (type, BuiltinFunctionType, MethodType, ModuleType, nn.Module)


class TensorValues:
    """A copy of the values of a tensor; equal if the values are equal, NaN included."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorValues) or not self.like(other):
            return False
        a, b = self.tensor, other.tensor
        return bool(((a == b) | ((a != a) & (b != b))).all())

    def like(self, other: TensorValues) -> bool:
        """Whether both have the same shape and dtype."""
        return self.tensor.shape == other.tensor.shape and self.tensor.dtype == other.tensor.dtype


def module_state(parts: Iterable[tuple[str, nn.Module]]) -> State:
    """The parameters, buffers and attributes of modules, without submodules."""
    seen: dict[int, Any] = {}
    state: State = {}
    for path, part in parts:
        parameters, buffers = tensors_in(part)
        attributes = {
            name: value for name, value in part.__dict__.items() if not is_framework_attribute(name)
        }
        for name, value in (attributes | parameters | buffers).items():
            state[path, name] = comparable(value, seen, values=True)
    return state


def tensors_held(parts: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[Place, torch.Tensor]]:
    """The parameters and buffers of modules, and the tensors in their attributes and in what these hold."""
    # by id: what several modules have (their configuration) is searched once
    without: set[int] = set()
    for path, part in parts:
        parameters, buffers = tensors_in(part)
        for name, value in chain(parameters.items(), buffers.items(), part.__dict__.items()):
            if is_value(value) or id(value) in without or is_framework_attribute(name):
                continue
            empty = True
            for tensor in tensors_within(value):
                empty = False
                yield (path, name), tensor
            if empty:
                without.add(id(value))


def modules_around(model: nn.Module, units: Iterable[str]) -> list[tuple[str, nn.Module]]:
    """(path, module) of the modules of a model that are in no unit, under whatever name."""
    inside = {part for unit in units for part in model.get_submodule(unit).modules()}
    return [(path, part) for path, part in model.named_modules() if part not in inside]


def holders(model: nn.Module, units: Iterable[str]) -> dict[str, frozenset[str]]:
    """Name of a tensor of a unit or of the model around units -> the units whose modules hold its memory, "" for that model.

    Only where several do: a buffer that all layers of a list have, say.
    """
    parts = {unit: list(model.get_submodule(unit).named_modules()) for unit in units}
    parts[""] = modules_around(model, parts)
    places: dict[int, dict[str, str]] = {}
    for unit, held in parts.items():
        for (path, name), tensor in tensors_held(held):
            memory = memory_of(tensor)
            where = ".".join(filter(None, (unit, path, name)))
            places.setdefault(id(tensor) if memory is None else memory, {})[where] = unit
    return {
        where: frozenset(units_of.values())
        for units_of in places.values()
        if len(set(units_of.values())) > 1
        for where in units_of
    }


def changed_places(before: State, after: State) -> list[Place]:
    """The places where two states differ."""
    places = dict.fromkeys((*before, *after))
    return [at for at in places if at not in before or at not in after or before[at] != after[at]]


def comparable(value: Any, seen: dict[int, Any] | None = None, values: bool = False, depth: int = 0) -> Any:
    """A value that differs from another one if the original was changed.

    seen: containers and objects by id. values: compare the values of tensors too, not only their shapes.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        ordinary = values and not value.is_meta and value.numel() <= LARGE
        return TensorValues(value) if ordinary else (torch.Tensor, value.shape)
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return type(value), value
    if isinstance(value, _PRINTED):
        # NaN equals NaN
        return type(value), repr(value)
    if isinstance(value, FunctionType):
        return type(value), value.__qualname__
    # numpy
    if hasattr(value, "tobytes") and getattr(value, "nbytes", LARGE) < 8 * LARGE:
        return type(value), getattr(value, "shape", None), value.tobytes()
    if depth == _DEEP or isinstance(value, _OPAQUE):
        return type(value)
    if id(value) not in seen:
        # in case it contains itself
        seen[id(value)] = type(value)
        seen[id(value)] = _contents(value, seen, values, depth + 1)
    return seen[id(value)]


def _contents(value: Any, seen: dict[int, Any], values: bool, depth: int) -> Any:
    if isinstance(value, _LISTS):
        return type(value), *(comparable(item, seen, values, depth) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), len(value), frozenset(item for item in value if isinstance(item, _HASHED))
    entries = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
    if not isinstance(entries, Mapping):
        return type(value)
    return type(value), *(
        tuple(comparable(x, seen, values, depth) for x in entry) for entry in entries.items()
    )
