"""What the code between units writes to itself, buffers and numbers: every rank runs some of it, and that of the last stage all.

So they are told to the others behind a step. Where the code behind the units runs once more, on the whole batch, they are set
back before it.


What modules keep in themselves, buffers and attributes, as values that can be compared: what a forward writes shows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import OWN_PARTS, tensors_in

Tensor = torch.Tensor
Place = tuple[str, str]
"""The path of a module, and the name of its buffer or attribute."""

_NUMBERS = (bool, int, float)
_FITS = 1 << 63


@dataclass(frozen=True)
class WrittenState:
    """Where a model writes.

    Attributes:
        buffers: those that are written.
        numbers: attributes that are numbers, and become others.
    """

    buffers: tuple[Place, ...] = ()
    numbers: tuple[Place, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buffers or self.numbers)

    def held(self, model: nn.Module) -> list[Tensor | None]:
        """What `model` has there: buffers whole, then numbers."""
        found = [tensors_in(model.get_submodule(path))[1][name] for path, name in self.buffers]
        numbers = [model.get_submodule(path).__dict__.get(name) for path, name in self.numbers]
        return [
            *(t.full_tensor() if isinstance(t, GlobalTensor) else t for t in found),
            *(_as_tensor(number) for number in numbers),
        ]

    def put(self, model: nn.Module, values: Sequence[Tensor | None]) -> None:
        """Give `model` these values, in the memory that buffers have where that fits."""
        count = len(self.buffers)
        for (path, name), value in zip(self.buffers, values[:count], strict=True):
            buffers = tensors_in(model.get_submodule(path))[1]
            old = buffers[name]
            if old is not None and value is not None and _alike(old, value):
                with torch.no_grad():
                    old.copy_(value)
            else:
                buffers[name] = value
        for (path, name), value in zip(self.numbers, values[count:], strict=True):
            if value is not None:
                model.get_submodule(path).__dict__[name] = value.item()


NO_WRITES = WrittenState()


def _alike(a: Tensor, b: Tensor) -> bool:
    return type(a) is type(b) and a.shape == b.shape and a.dtype == b.dtype


class StateWrites:
    """Buffers and numbers outside of units, as they are now.

    Args:
        model: whose they are.
        units: names of its units.

    Attributes:
        empty: buffers that are None now.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        inside = tuple(f"{unit}." for unit in units)
        self._parts = {
            path: part
            for path, part in model.named_modules()
            if path not in units and not path.startswith(inside)
        }
        self._before = {
            (path, name): (buffer, 0 if buffer is None else buffer._version)
            for path, part in self._parts.items()
            for name, buffer in tensors_in(part)[1].items()
        }
        self.empty = frozenset(at for at, (buffer, _) in self._before.items() if buffer is None)
        self._numbers = dict(self._counted())

    def buffers(self) -> dict[Place, Tensor]:
        """Those that have been written since, and their values."""
        return {
            (path, name): buffer
            for path, part in self._parts.items()
            for name, buffer in tensors_in(part)[1].items()
            if buffer is not None
            and (known := self._before.get((path, name))) is not None
            and (known[0] is not buffer or known[1] != buffer._version)
        }

    def numbers(self) -> tuple[Place, ...]:
        """Those of modules of which any is another one now: the rest may follow in a later forward."""
        now = dict(self._counted())
        changed_places = {
            at[0] for at, value in now.items() if self._numbers.get(at, value) != value and value == value
        }
        return tuple(at for at in now if at[0] in changed_places)

    def _counted(self) -> Iterator[tuple[Place, Any]]:
        for path, part in self._parts.items():
            for name, value in part.__dict__.items():
                if name not in OWN_PARTS and _is_number(value):
                    yield (path, name), value


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS and (type(value) is float or -_FITS <= value < _FITS)


def _as_tensor(value: Any) -> Tensor | None:
    if not _is_number(value):
        return None
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)


State = dict[Place, Any]

LARGE = 1 << 20
"""Tensors of more elements are taken to stay as they are."""

_DEEP = 4
"""How deep containers and objects are looked into."""

_LISTS = (list, tuple, deque)
_OPAQUE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, nn.Module)


class TensorValues:
    """The values of a tensor at one time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TensorValues) or not self.like(other):
            return False
        one, two = self.tensor, other.tensor
        return bool(((one == two) | ((one != one) & (two != two))).all())

    __hash__ = None  # type: ignore[assignment]

    def like(self, other: TensorValues) -> bool:
        """Whether they have one shape and dtype."""
        return self.tensor.shape == other.tensor.shape and self.tensor.dtype == other.tensor.dtype


def module_state(parts: Iterable[tuple[str, nn.Module]]) -> State:
    """What modules keep, by place; parts are left out."""
    seen: dict[int, Any] = {}
    found: State = {}
    for path, part in parts:
        parameters, buffers = tensors_in(part)
        own = {name: value for name, value in part.__dict__.items() if name not in OWN_PARTS}
        for name, value in (own | parameters | buffers).items():
            found[path, name] = _kept(value, 0, seen)
    return found


def changed_places(before: State, after: State) -> list[Place]:
    """The places where two states differ."""
    every = dict.fromkeys((*before, *after))
    return [at for at in every if at not in before or at not in after or before[at] != after[at]]


def _kept(value: Any, depth: int, seen: dict[int, Any]) -> Any:
    """What tells a value from what it may become."""
    if isinstance(value, torch.Tensor):
        ordinary = not value.is_meta and value.numel() <= LARGE
        return TensorValues(value) if ordinary else (torch.Tensor, value.shape)
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
