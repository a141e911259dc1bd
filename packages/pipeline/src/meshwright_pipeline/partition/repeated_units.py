"""Finds units that are repeated, so that a profile runs only one of them: same attributes, and same call signature.

Integers that number the units (`layer_idx`) may differ if a unit only passes them on. A trial run with proxies shows this.
"""

from __future__ import annotations

import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import MeshwrightError
from meshwright_pipeline._torch import hooks_of, is_framework_attribute, pre_hooks_of, tensors_in
from meshwright_pipeline.trace.forward_hooks import Forward
from meshwright_pipeline.trace.meta_model import SHOWN
from meshwright_pipeline.trace.microbatch import Call, signature, snapshot
from meshwright_pipeline.trace.profile import Result
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.rng_replay import DrawLog

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
"""Types of attributes that are compared by value. Others are compared by identity."""

_ALLOWED_READERS = frozenset({"transformers.cache_utils", "meshwright_pipeline.trace.meta_model"})
"""Modules that may read an IntProxy: caches, which index keys and values by layer, and the search for tensors in a unit."""

_PARTS: Mapping[type, Callable[[Any], Iterable[Any]]] = {
    tuple: iter,
    list: iter,
    dict: lambda value: itertools.chain.from_iterable(value.items()),
    MethodType: lambda value: (value.__func__, value.__self__),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
}
"""Types of attributes that are compared by their parts."""

_DEEP = 4
"""Nesting depth up to which containers are compared."""

Place = tuple[str, str]
"""(path of a submodule in its unit, name of an attribute)."""


class RepeatedUnitProfiler(Profiler):
    """A profiler that runs only one of several repeated units with equal call signatures."""

    def __init__(self, model: nn.Module, units: tuple[str, ...], settled: bool = False) -> None:
        super().__init__(model, units, settled)
        self._different: set[int] = set()
        """Groups of units that use the integers in which they differ."""
        self._results: dict[Hashable, Result] = {}
        # before any run changes attributes
        attributes = {unit: dict(_attributes(model.get_submodule(unit))) for unit in units}
        numbers = _numbering(attributes)
        groups: dict[Hashable, list[str]] = {}
        for unit, values in attributes.items():
            key: Hashable = tuple((at, int if at in numbers[unit] else value) for at, value in values.items())
            if any(hooks_of(part) or pre_hooks_of(part) for part in model.get_submodule(unit).modules()):
                # hooks may differ
                key = unit
            groups.setdefault(key, []).append(unit)
        self._built = {unit: built for built, group in enumerate(groups.values()) for unit in group}
        self._numbers = {unit: numbers[unit] for group in groups.values() if len(group) > 1 for unit in group}

    def kind(self, unit: str) -> Hashable:
        return self._built[unit]

    def forget(self) -> None:
        self._results.clear()

    def shape(self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawLog) -> Result:
        called = signature(call)
        built = self._built[unit]
        like = (built, called)
        # an argument that the signature describes by its type only may differ
        if built in self._different or any(isinstance(leaf, type) for leaf in called[1:]):
            return super().shape(unit, forward, call, device, drawn)
        if like not in self._results:
            # the trial may change the arguments
            unchanged = snapshot(*call)
            result = self._tried(unit, forward, call, device, drawn)
            if result is None:
                self._different.add(built)
                return super().shape(unit, forward, unchanged, device, drawn)
            self._results[like] = result
        return self._results[like]

    def _tried(
        self, unit: str, forward: Forward, call: Call, device: torch.device, drawn: DrawLog
    ) -> Result | None:
        """The result for all units of the group; None, with the unit unchanged, if it uses its numbers or changes itself."""
        module, seen = self.model.get_submodule(unit), list[str]()
        entries = [(part.__dict__, dict(part.__dict__)) for part in module.modules()]
        mark, before = drawn.mark(), dict(_attributes(module))
        places = [(module.get_submodule(path).__dict__, name) for path, name in self._numbers.get(unit, ())]
        values = [attributes[name] for attributes, name in places]
        proxies: list[weakref.ref[IntProxy]] = []
        for attributes, name in places:
            attributes[name] = IntProxy(attributes[name], seen)
            proxies.append(weakref.ref(attributes[name]))
        try:
            result = super().shape(unit, forward, call, device, drawn)
        except MeshwrightError:
            raise
        except Exception:
            # the model may need a real integer
            result = None
        finally:
            for (attributes, name), value in zip(places, values, strict=True):
                attributes[name] = value
        # a proxy that is still referenced may be read later
        kept = any(proxy() is not None for proxy in proxies)
        if result is not None and not kept and not seen and dict(_attributes(module)) == before:
            return result
        for attributes, old in entries:
            attributes.clear()
            attributes.update(old)
        drawn.back_to(mark)
        return None


def _recorded_method(name: str) -> Callable[..., Any]:
    def method(self: IntProxy, *args: Any) -> Any:
        self.note(name)
        return getattr(self.value, name)(*args)

    return method


def _with_int_operators(kind: type[IntProxy]) -> type[IntProxy]:
    """Add the special methods of int: Python looks them up on the class only."""
    for name in {*vars(int), "__str__"} - {*vars(kind), "__new__", "__getattribute__", "__getnewargs__"}:
        if name.startswith("__") and callable(getattr(int, name)):
            setattr(kind, name, _recorded_method(name))
    return kind


@_with_int_operators
class IntProxy:
    """Stands for an integer, and records in `seen` every use other than passing it on."""

    def __init__(self, value: int, seen: list[str]) -> None:
        self.value, self.seen = value, seen

    def note(self, what: str) -> None:
        """Record a use by the caller of the calling method."""
        if sys._getframe(2).f_globals.get("__name__") not in _ALLOWED_READERS:
            self.seen.append(what)

    def __getattr__(self, name: str) -> Any:
        self.note(name)
        return getattr(self.value, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # type: ignore[override]
        """Read by isinstance."""
        self.note("__class__")
        return int


def _numbering(units: Mapping[str, Mapping[Place, Hashable]]) -> dict[str, list[Place]]:
    """Unit -> its integers that equal its index in its list, or differ from it by a constant in all members.

    A unit may be a member of a list, or the same submodule of all members ("layers.0.attention").
    """
    values: dict[tuple[str, Place], dict[int, tuple[str, int | None]]] = {}
    for unit, attributes in units.items():
        parts = unit.split(".")
        at_key = max((place for place, part in enumerate(parts) if part.isdecimal()), default=None)
        if at_key is not None:
            like = ".".join([*parts[:at_key], "*", *parts[at_key + 1 :]])
            for at, value in attributes.items():
                number = value[1] if isinstance(value, tuple) and value[0] is int else None
                values.setdefault((like, at), {})[int(parts[at_key])] = unit, number
    numbering: dict[str, list[Place]] = {unit: [] for unit in units}
    for (_, at), members in values.items():
        offsets = {None if value is None else value - index for index, (_, value) in members.items()}
        if len(members) > 1 and len(offsets) == 1 and None not in offsets:
            for unit, _ in members.values():
                numbering[unit].append(at)
    return numbering


def _attributes(unit: nn.Module) -> Iterator[tuple[Place, Hashable]]:
    """The structure and attributes of a unit, by place. Units with equal values are repeated."""
    paths = {id(part): path for path, part in unit.named_modules()}
    for path, part in unit.named_modules(remove_duplicate=False):
        missing = [name for table in tensors_in(part) for name, value in table.items() if value is None]
        yield (path, ""), (type(part), part.training, paths[id(part)], *part._modules, *missing)
        for name, value in part.__dict__.items():
            if not is_framework_attribute(name) and name != SHOWN:
                # tensors of a skeleton have no values
                is_tensor = isinstance(value, torch.Tensor)
                like: Hashable = (torch.Tensor, value.shape, value.dtype) if is_tensor else _key(value, paths)
                yield (path, name), like


def _key(value: Any, paths: Mapping[int, str], depth: int = 0) -> Hashable:
    """Equal for attributes that are equal. `paths`: id of a submodule -> its path in the unit."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if id(value) in paths:
        return kind, paths[id(value)]
    if depth == _DEEP or kind not in _PARTS:
        return kind, id(value)
    return kind, *(_key(item, paths, depth + 1) for item in _PARTS[kind](value))
