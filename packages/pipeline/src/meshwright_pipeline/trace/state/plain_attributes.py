"""What units store in attributes while they run, and code outside of them reads.

Plain values (the height of a result, for example): other stages have those of the profile; the stage of the unit checks that each
forward stores the same ones. What a unit stores in modules outside of units is refused.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import Logger
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import is_framework_attribute
from meshwright_pipeline.module_state import Place, comparable
from meshwright_pipeline.pytrees import NO_STATE, is_plain, is_stand_in, tensors_of
from meshwright_pipeline.trace.profile import Key, Profile, Result
from meshwright_pipeline.trace.side_outputs import CannotBeCut, part_of

Read = tuple[str, str]
"""A unit, and the label path of its attribute (see side_outputs)."""

_MISSING = object()
_CONTAINERS = (list, dict, set, deque)
_SHARED = "="
"""In place of the path of a module, for objects that several units have."""


class PlainAttributes:
    """The attributes of a unit without tensors, as they are before a call."""

    def __init__(self, unit: nn.Module) -> None:
        self._unit = unit
        self._before = {at: copy.copy(v) if type(v) in _CONTAINERS else v for at, v in _attributes(unit)}
        self._compared = _compared(unit)

    def changed(self) -> dict[str, Any]:
        """Label path -> what the call has stored there."""
        now = _compared(self._unit)
        changed = {at: like for at, like in now.items() if self._compared.get(at, _MISSING) != like}
        return {at: value for at, value in _attributes(self._unit) if at in changed and not tensors_of(value)}

    def restore(self, paths: Iterable[str]) -> None:
        """Put back what was there."""
        for at in paths:
            part, name = part_of(self._unit, at)
            part.__dict__.pop(name, None)
            if at in self._before:
                part.__dict__[name] = self._before[at]


def put_plain(unit: nn.Module, stored: Mapping[str, Any]) -> None:
    """Store values in attributes of a unit as its call would."""
    for at, value in stored.items():
        part, name = part_of(unit, at)
        part.__dict__[name] = copy.deepcopy(value)


def differing(unit: nn.Module, planned: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """(Attribute, value, value when it was planned) of the attributes that are not as planned."""
    for at, value in planned.items():
        part, name = part_of(unit, at)
        now = part.__dict__.get(name)
        if comparable(now) != comparable(value):
            yield name, now, value


Outside = dict[Place, tuple[Any, Any]]
"""Attributes of modules outside of units: the value, and what changes where it is written to."""


def shared_objects(model: nn.Module, units: Iterable[str]) -> dict[str, Any]:
    """Objects, lists and dicts in attributes of several units, by the path of one of these attributes."""
    held: dict[int, tuple[set[str], str, Any]] = {}
    for unit in units:
        for at, value in _attributes(model.get_submodule(unit)):
            kind = type(value)
            if kind in _CONTAINERS or (
                hasattr(value, "__dict__") and not issubclass(kind, (*NO_STATE, Logger))
            ):
                path = f"{_module_of(unit, at)}.{at.partition(':')[2]}"
                held.setdefault(id(value), (set(), path, value))[0].add(unit)
    return {path: value for owners, path, value in held.values() if len(owners) > 1}


def outside_of(modules: Iterable[tuple[str, nn.Module]], shared: Mapping[str, Any]) -> Outside:
    """The attributes and buffers of modules, and objects that units share."""
    objects = {(_SHARED, path): (value, comparable(value)) for path, value in shared.items()}
    return objects | {
        (path, name): (value, _mark(value))
        for path, part in modules
        for name, value in (*part.__dict__.items(), *part._buffers.items())
        if not is_framework_attribute(name)
    }


def _mark(value: Any) -> Any:
    kind = type(value)
    if issubclass(kind, torch.Tensor):
        return id(value), value._version
    if kind in _CONTAINERS:
        return comparable(value), *map(id, tensors_of(value))
    return comparable(value) if kind in (bool, int, float, str) else id(value)


def check_outside(unit: str, before: Outside, after: Outside) -> None:
    """Raise CannotBeCut if the call of a unit has written to modules outside of units, which other stages have too."""
    for at in before | after:
        (old, was), (new, now) = before.get(at, (None, None)), after.get(at, (None, None))
        # a tensor that is made once (a mask), every stage makes where it needs it
        if was != now and not (old is None and isinstance(new, torch.Tensor)):
            where = f" of module {at[0]!r}" if at[0] else " of the model"
            where = ", which modules share," if at[0] == _SHARED else where
            raise CannotBeCut(
                f"module {unit!r} writes to {at[1]!r}{where} in its forward, and other stages would not have it. Return it, "
                "keep it in an attribute of the module, or plan without pp"
            )


class PlainReads:
    """Records which plain attributes of units code outside of them reads.

    profile: of a run before. running: the unit that runs now, or "". results: of the calls of units up to now.
    """

    def __init__(
        self, model: nn.Module, profile: Profile, running: Callable[[], str], results: Mapping[Key, Result]
    ) -> None:
        self._running, self._results = running, results
        self._stored = {
            (unit, at): value
            for (unit, _), result in profile.results.items()
            for at, value in result.plain.items()
        }
        self._owners: dict[tuple[nn.Module, str], list[Read]] = {}
        for unit, at in self._stored:
            self._owners.setdefault(part_of(model.get_submodule(unit), at), []).append((unit, at))
        self._units = {key[0]: set(model.get_submodule(key[0]).modules()) for key in profile.order}
        shared = [at for at in self._owners if sum(at[0] in parts for parts in self._units.values()) > 1]
        self._first = {(part, name): copy.copy(part.__dict__.get(name, _MISSING)) for part, name in shared}
        self._expected = self._by_call(profile)
        self._read_inside: set[tuple[nn.Module, str]] = set()
        self.reads: set[Read] = set()

    def _by_call(self, profile: Profile) -> dict[Key, dict[tuple[nn.Module, str], Any]]:
        """Unit call -> the values of what units share after it."""
        now, by_call = dict(self._first), {}
        for key in profile.order:
            for place, owners in self._owners.items():
                for unit, at in owners:
                    if unit == key[0] and place in now and at in profile.results[key].plain:
                        now[place] = profile.results[key].plain[at]
            by_call[key] = dict(now)
        return by_call

    def ended(self, key: Key) -> None:
        """After a call that has begun as if no other call had written to what units share.

        Raises CannotBeCut: it has read some of that, and has not written the value that all calls before gave it (a cache does).
        """
        for part, name in self._read_inside:
            now, expected = part.__dict__.get(name, _MISSING), self._expected.get(key, {})
            if (part, name) in expected and comparable(now) != comparable(expected[part, name]):
                writer = _module_of(*self._owners[part, name][0])
                raise CannotBeCut(
                    f"module {writer!r} stores {name!r} in its forward, and module {key[0]!r}, which holds it too, reads it: on "
                    "another stage it has the value of before. Return it, or plan without pp"
                )
        self._read_inside.clear()
        for (part, name), value in self._first.items():
            part.__dict__.pop(name, None)
            if value is not _MISSING:
                part.__dict__[name] = copy.copy(value)

    def note(self, part: nn.Module, name: str) -> None:
        """Record a read. Raises CannotBeCut: other stages cannot have that value."""
        owners = self._owners.get((part, name), [])
        if part in self._units.get(self._running(), ()):
            self._read_inside.add((part, name))
            return
        for unit, at in owners:
            value = self._stored[unit, at]
            stored = (
                f"module {_module_of(unit, at)!r} stores {type(value).__name__} {name!r} in its forward, and code outside of it "
                "reads it "
            )
            if all(key[0] != unit for key in self._results):
                raise CannotBeCut(
                    f"{stored}before it is called: the value of the forward before, which other stages do not have. Keep it in the "
                    "code that reads it, or plan without pp"
                )
            if not is_plain(value) or (part, name) in self._first:
                raise CannotBeCut(
                    f"{stored}there. Other stages do not have it: return it, store plain values or tensors, or plan without pp"
                )
            self.reads.add((unit, at))

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, reads are recorded."""
        watched = []
        for kind, name in {(type(part), name) for part, name in self._owners}:
            default = getattr(kind, name, _MISSING)
            if not hasattr(type(default), "__set__"):
                watched.append((kind, name, kind.__dict__.get(name, _MISSING)))
                setattr(kind, name, _Watched(name, default, self.note))
        try:
            yield
        finally:
            for kind, name, before in watched:
                delattr(kind, name)
                if before is not _MISSING:
                    setattr(kind, name, before)


class _Watched:
    """In place of a class attribute: calls `read` where an attribute of an object is read."""

    def __init__(self, name: str, default: Any, read: Callable[[nn.Module, str], None]) -> None:
        self._name, self._default, self._read = name, default, read

    def __get__(self, part: Any, kind: Any) -> Any:
        if part is not None:
            self._read(part, self._name)
            if self._name in part.__dict__:
                return part.__dict__[self._name]
        if self._default is _MISSING:
            # __getattr__ of the class is asked next
            raise AttributeError(self._name)
        return self._default

    def __set__(self, part: Any, value: Any) -> None:
        part.__dict__[self._name] = value

    def __delete__(self, part: Any) -> None:
        if self._name not in part.__dict__:
            raise AttributeError(self._name)
        del part.__dict__[self._name]


def _module_of(unit: str, at: str) -> str:
    """The path of the module that has an attribute."""
    return f"{unit}.{at.partition(':')[0]}".rstrip(".")


def _attributes(unit: nn.Module) -> Iterator[tuple[str, Any]]:
    for path, part in unit.named_modules():
        for name, value in part.__dict__.items():
            if not is_framework_attribute(name) and not is_stand_in(value):
                yield f"{path}:{name}", value


def _compared(unit: nn.Module) -> dict[str, Any]:
    seen: dict[int, Any] = {}
    return {at: comparable(value, seen=seen) for at, value in _attributes(unit)}
