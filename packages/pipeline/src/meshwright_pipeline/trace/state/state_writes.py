"""Buffers and plain attributes outside of units that a forward writes.

Each rank runs part of the code between units; only the rank of the last stage runs all of it. After a step it sends the
written values to the other ranks. If code after the units runs again on the whole batch, they are restored first.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import is_framework_attribute, tensors_in
from meshwright_pipeline.module_state import Place, comparable
from meshwright_pipeline.pytrees import entries_of, full_value, is_plain, tensors_of, version_of

Tensor = torch.Tensor
_PLAIN = frozenset({bool, int, float, str, type(None)})


@dataclass(frozen=True)
class WrittenState:
    """The state outside of units that a forward writes: buffers, and attributes with plain values."""

    buffers: tuple[Place, ...] = ()
    plain: tuple[Place, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.buffers or self.plain)

    def held(self, model: nn.Module) -> list[Tensor | None]:
        """The values of `model`: unsharded buffers, then plain values."""
        buffers = [tensors_in(model.get_submodule(path))[1][name] for path, name in self.buffers]
        plain = [model.get_submodule(path).__dict__.get(name) for path, name in self.plain]
        return [*map(full_value, buffers), *map(_as_tensor, plain)]

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
        for (path, name), value in zip(self.plain, values[count:], strict=True):
            assert value is not None
            attributes, now = (
                model.get_submodule(path).__dict__,
                pickle.loads(value.numpy(force=True).tobytes()),
            )
            # others may have the same list or dict
            if not _write_into(attributes.get(name), now):
                attributes[name] = now


NO_WRITES = WrittenState()


def modules_outside(model: nn.Module, units: Sequence[str]) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of the modules of a model outside of its units."""
    inside = tuple(f"{unit}." for unit in units)
    for path, part in model.named_modules():
        if path not in units and not path.startswith(inside):
            yield path, part


def plain_state(modules: Collection[nn.Module]) -> tuple[Any, ...]:
    """Numbers, flags and strings of these modules, without their submodules, and which tensors their buffers hold."""
    values = [value for module in modules for value in vars(module).values() if type(value) in _PLAIN]
    buffers = [x for module in modules for x in tensors_in(module)[1].values() if x is not None]
    return (*values, *((id(x), version_of(x)) for x in buffers))


class StateWrites:
    """Records buffers and plain attributes outside of units, to find out what is written later.

    empty: buffers that are None at first.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        self._parts = dict(modules_outside(model, units))
        self._before = {
            (path, name): (buffer, 0 if buffer is None else buffer._version)
            for path, part in self._parts.items()
            for name, buffer in tensors_in(part)[1].items()
        }
        self.empty = frozenset(at for at, (buffer, _) in self._before.items() if buffer is None)
        self._plain = dict(self._present())

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

    def plain(self) -> tuple[Place, ...]:
        """The attributes with plain values that have changed since. Where a number has, also all other numbers of that module,
        which may change in a later forward."""
        now, before = dict(self._present()), self._plain
        changed = {at for at, like in now.items() if before.get(at, like) != like or at not in before}
        changed = {at for at in changed if _can_be_sent(self._parts[at[0]].__dict__[at[1]])}
        counting = {path for path, name in changed if _is_number(self._parts[path].__dict__[name])}
        return tuple(
            at
            for at in now
            if at in changed or (at[0] in counting and _is_number(self._parts[at[0]].__dict__[at[1]]))
        )

    def _present(self) -> Iterator[tuple[Place, Any]]:
        for path, part in self._parts.items():
            for name, value in part.__dict__.items():
                if not is_framework_attribute(name) and is_plain(value) and not tensors_of(value):
                    yield (path, name), comparable(value)


def _write_into(old: Any, new: Any) -> bool:
    """Give a list, dict or set the contents of another one, and so those inside of it; whether it could be done."""
    if type(old) is not type(new) or type(new) not in (list, dict, set):
        return False
    if isinstance(new, set):
        old.clear()
        old.update(new)
        return True
    before, now = entries_of(old), entries_of(new)
    contents = {k: before[k] if k in before and _write_into(before[k], x) else x for k, x in now.items()}
    old.clear()
    if isinstance(new, dict):
        old.update(contents)
    else:
        old.extend(contents.values())
    return True


def _can_be_sent(value: Any) -> bool:
    try:
        pickle.dumps(value)
    except Exception:
        return False
    return True


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _as_tensor(value: Any) -> Tensor:
    """The bytes of a plain value."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
