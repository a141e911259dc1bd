"""Buffers and numbers outside of units that a forward writes.

Each rank runs part of the code between units; only the rank of the last stage runs all of it. After a step it sends the
written values to the other ranks. If code after the units runs again on the whole batch, they are restored first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import MODULE_ATTRIBUTES, tensors_in
from meshwright_pipeline.pytrees import full_value

Tensor = torch.Tensor
Place = tuple[str, str]
"""The path of a module, and the name of its buffer or attribute."""

_NUMBERS = (bool, int, float)
_INT64 = 1 << 63


@dataclass(frozen=True)
class WrittenState:
    """The state outside of units that a forward writes: buffers, and attributes that are numbers."""

    buffers: tuple[Place, ...] = ()
    numbers: tuple[Place, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buffers or self.numbers)

    def held(self, model: nn.Module) -> list[Tensor | None]:
        """The values of `model`: unsharded buffers, then numbers."""
        buffers = [tensors_in(model.get_submodule(path))[1][name] for path, name in self.buffers]
        numbers = [model.get_submodule(path).__dict__.get(name) for path, name in self.numbers]
        return [*map(full_value, buffers), *map(_as_tensor, numbers)]

    def put(self, model: nn.Module, values: Sequence[Tensor | None]) -> None:
        """Set these values in `model`. A buffer keeps its memory if shape and dtype allow."""
        count = len(self.buffers)
        for (path, name), value in zip(self.buffers, values[:count], strict=True):
            buffers = tensors_in(model.get_submodule(path))[1]
            old = buffers[name]
            alike = value is not None and type(old) is type(value)
            if value is not None and alike and (old.shape, old.dtype) == (value.shape, value.dtype):
                with torch.no_grad():
                    old.copy_(value)
            else:
                buffers[name] = value
        for (path, name), value in zip(self.numbers, values[count:], strict=True):
            if value is not None:
                model.get_submodule(path).__dict__[name] = value.item()


NO_WRITES = WrittenState()


def modules_outside(model: nn.Module, units: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the modules of a model outside of its units."""
    inside = tuple(f"{unit}." for unit in units)
    for path, part in model.named_modules():
        if path not in units and not path.startswith(inside):
            yield path, part


class StateWrites:
    """Records buffers and numbers outside of units, to find out what is written later. `empty`: buffers that are None at first."""

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self._parts = dict(modules_outside(model, units))
        self._before = {
            (path, name): (buffer, 0 if buffer is None else buffer._version)
            for path, part in self._parts.items()
            for name, buffer in tensors_in(part)[1].items()
        }
        self.empty = frozenset(at for at, (buffer, _) in self._before.items() if buffer is None)
        self._numbers = dict(self._present_numbers())

    def buffers(self, wrote_to: Callable[[Tensor], bool]) -> dict[Place, Tensor]:
        """The buffers that have been written since, and their values; versions do not tell of writes through `.data`."""
        return {
            (path, name): buffer
            for path, part in self._parts.items()
            for name, buffer in tensors_in(part)[1].items()
            if buffer is not None
            and (before := self._before.get((path, name))) is not None
            and (before[0] is not buffer or before[1] != buffer._version or wrote_to(buffer))
        }

    def numbers(self) -> tuple[Place, ...]:
        """The numbers of modules with a changed number. The others of these modules may change in a later forward."""
        now, before = dict(self._present_numbers()), self._numbers
        changed = {at[0] for at, value in now.items() if before.get(at, value) != value and value == value}
        return tuple(at for at in now if at[0] in changed)

    def _present_numbers(self) -> Iterator[tuple[Place, Any]]:
        for path, part in self._parts.items():
            for name, value in part.__dict__.items():
                if name not in MODULE_ATTRIBUTES and _is_number(value):
                    yield (path, name), value


def _is_number(value: Any) -> bool:
    return type(value) in _NUMBERS and (type(value) is float or -_INT64 <= value < _INT64)


def _as_tensor(value: Any) -> Tensor | None:
    if not _is_number(value):
        return None
    return torch.tensor(value, dtype=torch.float64 if type(value) is float else None)
