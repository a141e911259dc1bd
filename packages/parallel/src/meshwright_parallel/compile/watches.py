"""Watches the values that a compiled graph depends on: attributes of modules and of other objects, globals, enclosing variables.

A value is watched by identity where it cannot change itself, by a copy where it is a container of such values, and by the
watches of its own attributes where it is another object.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from types import (
    BuiltinFunctionType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any

import torch
from torch import nn

from meshwright_parallel._torch.core import module_parts
from meshwright_parallel.compile.python_reads import PythonReads

IMMUTABLE: tuple[type, ...] = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
)
"""Types whose values never change, and are equal where their repr is."""
_CODE = (
    *(FunctionType, BuiltinFunctionType, MethodType, type, ModuleType, property, classmethod, staticmethod),
    *(partial, cached_property, MemberDescriptorType, GetSetDescriptorType, MethodDescriptorType),
    *(WrapperDescriptorType, MethodWrapperType),
)
_MISSING = object()
_DEPTH = 5


class CannotWatch(Exception):
    """A value that a graph depends on cannot be watched; the text says which."""


@dataclass(eq=False)
class Watches:
    """What a graph depends on, but for its tensors.

    Attributes:
        of_modules: (number of the module, attribute, value, copy or None) of the modules of the region, in their order.
        of_others: (namespace, name, value, copy or None).
        of_cells: (cell, value, copy or None).
    """

    of_modules: list[tuple[int, str, Any, Any]] = field(default_factory=list)
    of_others: list[tuple[dict[str, Any], str, Any, Any]] = field(default_factory=list)
    of_cells: list[tuple[Any, Any, Any]] = field(default_factory=list)

    @staticmethod
    def of(modules: Sequence[nn.Module], reads: PythonReads) -> Watches:
        """The watches of what was read. Raises CannotWatch: a value that may change unseen."""
        watches = Watches()
        seen = {id(module) for module in modules}
        for number, module in enumerate(modules):
            for name, value in _attributes(module, reads.attributes):
                if value is _MISSING:
                    watches.of_modules.append((number, name, value, None))
                    continue
                kept = watches._watch(f"{type(module).__name__}.{name}", value, reads.attributes, seen, 0)
                watches.of_modules.append((number, name, value, kept))
        for kind in dict.fromkeys(kind for module in modules for kind in _classes(module)):
            for name in vars(kind).keys() & (vars(kind) if reads.attributes is None else reads.attributes):
                value = vars(kind)[name]
                kept = watches._watch(f"{kind.__name__}.{name}", value, reads.attributes, seen, 0)
                watches.of_others.append((vars(kind), name, value, kept))  # type: ignore[arg-type]
        for (_, name), (space, value) in reads.globals.items():
            kept = watches._watch(f"the global {name}", value, reads.attributes, seen, 0)
            watches.of_others.append((space, name, value, kept))
        for cell, value in reads.cells.values():
            kept = watches._watch("a variable of an enclosing function", value, reads.attributes, seen, 0)
            watches.of_cells.append((cell, value, kept))
        return watches

    def _watch(self, what: str, value: Any, names: Collection[str] | None, seen: set[int], depth: int) -> Any:
        """Watch what may change inside of a value; returns a copy to compare it with, None where identity is enough."""
        if isinstance(value, IMMUTABLE) or type(value).__module__.startswith("meshwright_"):
            return None
        if isinstance(value, _CODE):
            self._namespace(value, names, seen)
            return None
        if isinstance(value, torch.Tensor):
            raise CannotWatch(
                f"it reads a tensor, {what}, which is neither a parameter nor a buffer; register it as a buffer"
            )
        if isinstance(value, (list, tuple, set, frozenset, dict)):
            return self._container(what, value, names, seen, depth)
        if id(value) in seen:
            return None
        seen.add(id(value))
        if depth > _DEPTH:
            raise CannotWatch(f"{what} is nested too deeply to be watched")
        if isinstance(value, nn.Module):
            raise CannotWatch(f"it reads {what}, a module that is not a part of it")
        if hasattr(value, "__next__"):
            raise CannotWatch(f"{what} is an iterator, which changes when it is read")
        attributes = getattr(value, "__dict__", None)
        if not isinstance(attributes, dict):
            raise CannotWatch(f"{what} is a {type(value).__name__}, which may change unseen")
        for name, inner in list(attributes.items()):
            if names is None or name in names:
                kept = self._watch(f"{what}.{name}", inner, names, seen, depth + 1)
                self.of_others.append((attributes, name, inner, kept))
        return None

    def _namespace(self, value: Any, names: Collection[str] | None, seen: set[int]) -> None:
        """Watch the data of a module or a class of the user whose attributes were read."""
        if not isinstance(value, (type, ModuleType)) or id(value) in seen:
            return
        seen.add(id(value))
        root = (value.__module__ if isinstance(value, type) else value.__name__).partition(".")[0]
        libraries = root in sys.stdlib_module_names or root in ("torch", "numpy")
        space: Any = vars(value)
        for name in space.keys() & (names or ()):
            inner = space[name]
            kept = None if libraries else self._watch(f"{value.__name__}.{name}", inner, names, seen, 1)
            self.of_others.append((space, name, inner, kept))

    def _container(
        self, what: str, value: Any, names: Collection[str] | None, seen: set[int], depth: int
    ) -> Any:
        if id(value) in seen:
            return None
        seen.add(id(value))
        if depth > _DEPTH:
            raise CannotWatch(f"{what} is nested too deeply to be watched")
        for inner in [*value, *value.values()] if isinstance(value, dict) else value:
            self._watch(f"an item of {what}", inner, names, seen, depth + 1)
        return None if isinstance(value, (tuple, frozenset)) else _copied(value)

    def changed(self, modules: Sequence[nn.Module]) -> str | None:
        """What is not as it was; None if nothing has changed."""
        for number, name, value, kept in self.of_modules:
            now = modules[number].__dict__.get(name, _MISSING)
            if now is not value or kept is not None:
                if not _same(now, value, kept):
                    return f"{type(modules[number]).__name__}.{name}"
        for space, name, value, kept in self.of_others:
            now = space.get(name, _MISSING)
            if now is not value or kept is not None:
                if not _same(now, value, kept):
                    return name
        for cell, value, kept in self.of_cells:
            try:
                now = cell.cell_contents
            except ValueError:
                now = _MISSING
            if now is not value or kept is not None:
                if not _same(now, value, kept):
                    return "a variable of an enclosing function"
        return None


def _attributes(module: nn.Module, names: Collection[str] | None) -> Iterator[tuple[str, Any]]:
    """Attributes of a module, but for its parts, that have one of these names (None: all).

    One that only its class has is `_MISSING`: the module may get its own.
    """
    parts = module_parts(module)
    values = vars(module)
    for name in values if names is None else names:
        if name in parts or name == "forward" or name.startswith("_meshwright"):
            continue
        if name in values:
            yield name, values[name]
        elif any(name in vars(kind) for kind in _classes(module)):
            yield name, _MISSING


def _classes(module: nn.Module) -> list[type]:
    """The classes of a module below nn.Module."""
    return [kind for kind in type(module).__mro__ if kind not in (nn.Module, object)]


def _copied(value: Any) -> Any:
    """A copy of a container, with copies of the containers in it."""
    if isinstance(value, dict):
        return {k: _copied(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_copied(v) for v in value]
    return set(value) if isinstance(value, set) else value


def _same(now: Any, value: Any, kept: Any) -> bool:
    """Whether a value is the one that was watched, or an equal one that cannot change."""
    if kept is not None:
        return type(now) is type(value) and _equal(now, kept)
    if now is value:
        return True
    return type(now) is type(value) and isinstance(now, (*IMMUTABLE, tuple)) and _equal(now, value)


def _equal(a: Any, b: Any) -> bool:
    """Equal in value and type, inside of containers too. Objects are equal only to themselves."""
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return list(a) == list(b) and all(_equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return a.hex() == b.hex()
    return isinstance(a, (*IMMUTABLE, set, frozenset)) and bool(a == b)
