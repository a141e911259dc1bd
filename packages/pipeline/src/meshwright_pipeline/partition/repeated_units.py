"""Which units are copies of each other, so that one of them is run: built alike, to the last attribute, and called alike.

Numbers that count the copies (`layer_idx`) are no difference where a unit only hands them on: a trial run with stand-ins shows it.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import OWN_PARTS, hooks_of, pre_hooks_of, tensors_in
from meshwright_pipeline.trace.forward_hooks import Forward
from meshwright_pipeline.trace.microbatch import Call, signature
from meshwright_pipeline.trace.profile import Result
from meshwright_pipeline.trace.profiler import Profiler, snapshot
from meshwright_pipeline.trace.rng_replay import DrawRecorder

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of attributes that are alike where they are equal; whatever is not known is alike where it is the same object."""

_MAY = frozenset({"transformers.cache_utils", "meshwright_pipeline.trace.meta_model"})
"""Code that may look at the numbers of copies: caches, which keep keys and values of each layer by its number, and what looks for
tensors in a unit."""

_DEEP = 4
"""How deep containers are looked into."""

Place = tuple[str, str]
"""Of an attribute: the path of a part of a unit, and its name."""


class RepeatedUnitProfiler(Profiler):
    """Takes units that are built alike and called alike to return alike: one of the copies of a block is run."""

    def __init__(self, model: nn.Module, units: tuple[str, ...]) -> None:
        super().__init__(model, units)
        self._apart: set[int] = set()
        self._results: dict[Hashable, Result] = {}
        # now, since runs fill units, and hang something into them
        found = {unit: dict(_attributes(model.get_submodule(unit))) for unit in units}
        numbers = _counting(found)
        groups: dict[Hashable, list[str]] = {}
        for unit, own in found.items():
            key: Hashable = tuple((at, int if at in numbers[unit] else value) for at, value in own.items())
            if any(hooks_of(part) or pre_hooks_of(part) for part in model.get_submodule(unit).modules()):
                key = unit  # hooks may do anything
            groups.setdefault(key, []).append(unit)
        self._built = {unit: built for built, group in enumerate(groups.values()) for unit in group}
        self._numbers = {unit: numbers[unit] for group in groups.values() if len(group) > 1 for unit in group}

    def kind(self, unit: str) -> Hashable:
        """See Profiler."""
        return self._built[unit]

    def shape(
        self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawRecorder
    ) -> Result:
        """See Profiler."""
        called = signature(call)
        built = self._built[unit]
        like = (built, called)
        # an argument of which nothing but the type is known may be another one
        if built in self._apart or any(isinstance(leaf, type) for leaf in called[1:]):
            return super().shape(unit, forward, call, device, drawn)
        if like not in self._results:
            given = snapshot(*call)  # a trial may change it, as the run would
            result = self._tried(unit, forward, call, device, drawn)
            if result is None:
                self._apart.add(built)
                return super().shape(unit, forward, given, device, drawn)
            self._results[like] = result
        return self._results[like]

    def _tried(
        self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawRecorder
    ) -> Result | None:
        """What a call returns, and those of copies; None, and nothing has changed in the unit, where they may return otherwise.

        That is where the unit does more than hand on the numbers by which it differs from them, or leaves something in itself.
        """
        module, seen = self.model.get_submodule(unit), list[str]()
        entries = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
        mark, before = drawn.mark(), dict(_attributes(module))
        held = [(module.get_submodule(path).__dict__, name) for path, name in self._numbers.get(unit, ())]
        whole = [own[name] for own, name in held]
        alive = [_put(own, name, seen) for own, name in held]
        try:
            result = super().shape(unit, forward, call, device, drawn)
        except Exception:  # whatever a model does that is given another thing than an integer
            result = None
        for (own, name), value in zip(held, whole, strict=True):
            own[name] = value
        # whoever still has one may ask it later: what the unit has returned, or what it was given
        kept = any(number() is not None for number in alive)
        if result is not None and not kept and not seen and dict(_attributes(module)) == before:
            return result
        for own, old in entries:
            own.clear()
            own.update(old)
        drawn.back_to(mark)
        return None


def _put(entries: dict[str, Any], name: str, seen: list[str]) -> weakref.ref[IntProxy]:
    """Let a stand-in take the place of an integer."""
    number = entries[name] = IntProxy(entries[name], seen)
    return weakref.ref(number)


def _noting(name: str) -> Callable[..., Any]:
    def method(self: IntProxy, *args: Any) -> Any:
        self.note(name)
        return getattr(self.value, name)(*args)

    return method


def _noted(kind: type[IntProxy]) -> type[IntProxy]:
    """With the operators of integers: they are looked for in the class alone."""
    for name in {*vars(int), "__str__"} - {*vars(kind), "__new__", "__getattribute__", "__getnewargs__"}:
        if name.startswith("__") and callable(getattr(int, name)):
            setattr(kind, name, _noting(name))
    return kind


@_noted
class IntProxy:
    """Stands for an integer, and notes in `seen` whatever is done with it but handing it on."""

    def __init__(self, value: int, seen: list[str]) -> None:
        self.value, self.seen = value, seen

    def note(self, what: str) -> None:
        """Whoever calls the caller does something."""
        if sys._getframe(2).f_globals.get("__name__") not in _MAY:
            self.seen.append(what)

    def __getattr__(self, name: str) -> Any:
        self.note(name)
        return getattr(self.value, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """What isinstance asks for."""
        self.note("__class__")
        return int


def _counting(units: Mapping[str, Mapping[Place, Hashable]]) -> dict[str, list[Place]]:
    """Unit -> its integers that are its place in its list, or off by the same in all members that have them.

    A unit may be a member of a list, or the same part of all its members ("layers.0.attention").
    """
    values: dict[tuple[str, Place], dict[int, tuple[str, int | None]]] = {}
    for unit, own in units.items():
        parts = unit.split(".")
        at_key = max((place for place, part in enumerate(parts) if part.isdecimal()), default=None)
        if at_key is not None:
            like = ".".join([*parts[:at_key], "*", *parts[at_key + 1 :]])
            for at, found in own.items():
                number = found[1] if isinstance(found, tuple) and found[0] is int else None
                values.setdefault((like, at), {})[int(parts[at_key])] = unit, number
    counting: dict[str, list[Place]] = {unit: [] for unit in units}
    for (_, at), known in values.items():
        offsets = {None if value is None else value - place for place, (_, value) in known.items()}
        if len(known) > 1 and len(offsets) == 1 and None not in offsets:
            for unit, _ in known.values():
                counting[unit].append(at)
    return counting


def _attributes(unit: nn.Module) -> Iterator[tuple[Place, Hashable]]:
    """All that tells a unit from another one, by place: what its parts are, and what they have beside torch's own tables."""
    own = {id(part): path for path, part in unit.named_modules()}
    for path, part in unit.named_modules(remove_duplicate=False):
        missing = [name for table in tensors_in(part) for name, value in table.items() if value is None]
        yield (path, ""), (type(part), part.training, own[id(part)], *part._modules, *missing)
        for name, value in part.__dict__.items():
            if name not in OWN_PARTS:
                sizes = isinstance(value, torch.Tensor)  # in the unit it has no values while that runs
                yield (path, name), _sizes(value) if sizes else _key(value, own)


def _sizes(tensor: torch.Tensor) -> Hashable:
    return torch.Tensor, tensor.shape, tensor.dtype


def _key(value: Any, own: Mapping[int, str], depth: int = 0) -> Hashable:
    """The same for what is alike. `own`: the parts of the unit that has it."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if id(value) in own:
        return kind, own[id(value)]
    found: list[Any] | None = None
    if depth == _DEEP:
        pass
    elif kind in (tuple, list):
        found = list(value)
    elif kind is dict:
        found = [one for pair in value.items() for one in pair]
    elif kind is MethodType:
        found = [value.__func__, value.__self__]
    elif kind is functools.partial:
        found = [value.func, value.args, value.keywords]
    if found is None:
        return kind, id(value)
    return kind, *(_key(one, own, depth + 1) for one in found)
