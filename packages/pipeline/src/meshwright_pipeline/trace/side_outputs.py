"""Tensors that a unit stores in attributes while it runs (a load-balancing loss, for example), for code outside to read.

The label path of such an attribute is submodule and name, "router:loss". The label path of an output that a forward hook
sees is the submodule alone. What a unit puts in a list, dict or object that it is given has a path as "=0".
"""

from __future__ import annotations

import dataclasses
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import is_framework_attribute
from meshwright_pipeline.pytrees import (
    ATTRIBUTES,
    Containers,
    attribute_tensors,
    entries_of,
    is_plain,
    leaves_of,
)
from meshwright_pipeline.trace.state.state_writes import modules_outside

Attributes = dict[str, tuple[Any, tuple[Callable[[], Any], ...]]]
"""Path -> the value, and a function for each of its leaves (tensors are referenced weakly)."""
_GIVEN = "="
"""Begins the label paths of entries of lists and dicts that a unit is given."""
_KINDS = (torch.Tensor, list, tuple, dict, SimpleNamespace)
"""Attributes of these types, and dataclasses, are searched for tensors."""


class CannotBeCut(UnsupportedError):
    """Modules exchange tensors in a way that no p2p message can carry."""


def is_attribute(path: str) -> bool:
    """Whether a label path is that of an attribute."""
    return ":" in path


def part_of(unit: nn.Module, path: str) -> tuple[nn.Module, str]:
    """The submodule that has an attribute, and its name."""
    inside, _, name = path.partition(":")
    return unit.get_submodule(inside), name


def attribute_leaves(unit: nn.Module) -> Attributes:
    """The attributes of a unit and its submodules that may contain tensors."""
    attributes: Attributes = {}
    for path, part in unit.named_modules():
        for name, value in part.__dict__.items():
            kind = type(value)
            if is_framework_attribute(name) or not (
                issubclass(kind, _KINDS) or dataclasses.is_dataclass(kind)
            ):
                continue
            try:
                leaves = leaves_of(value)
            except RecursionError:
                # it contains itself
                leaves = []
            attributes[f"{path}:{name}"] = value, tuple(map(_held, leaves))
    return attributes


def _held(leaf: Any) -> Callable[[], Any]:
    """Returns the leaf. Tensors are not kept alive, they may hold the graph of a step."""
    return weakref.ref(leaf) if isinstance(leaf, torch.Tensor) else lambda: leaf


def new_side_outputs(before: Attributes, unit: nn.Module) -> tuple[dict[str, Any], frozenset[str]]:
    """Attributes with other tensors than before, and the paths of those where tensors were added to the same container."""
    changed, grown = dict[str, Any](), set[str]()
    for place, (value, now) in attribute_leaves(unit).items():
        old, leaves = before.get(place), [leaf() for leaf in now]
        earlier = None if old is None else [leaf() for leaf in old[1]]
        same = earlier is not None and len(earlier) == len(leaves) and all(map(operator.is_, earlier, leaves))
        if not same and any(isinstance(leaf, torch.Tensor) for leaf in leaves):
            changed[place] = value
            if old is not None and old[0] is value:
                grown.add(place)
    return changed, frozenset(grown)


@dataclasses.dataclass(frozen=True)
class Entry:
    """A place in a list or dict that a call is given. `container`: its path in the arguments."""

    container: tuple[Any, ...]
    key: Any

    def of(self, containers: Containers) -> Any:
        """What is there."""
        return containers[self.container][self.key]

    def put(self, containers: Containers, value: Any) -> None:
        """Put a value there."""
        container = containers[self.container]
        if isinstance(container, list) and self.key == len(container):
            container.append(value)
        else:
            container[self.key] = value


class Entries:
    """The entries of lists and dicts that a call is given, as they are before it."""

    def __init__(self, containers: Containers) -> None:
        self.containers = containers
        self._before = {path: entries_of(container) for path, container in containers.items()}

    def changed(self, unit: str) -> dict[str, Entry]:
        """Label path -> entry that the call has put there: tensors and plain values, alone or in lists, tuples and dicts.

        Raises CannotBeCut: it has removed some.
        """
        places: list[Entry] = []
        for path, before in self._before.items():
            after = entries_of(self.containers[path])
            if before.keys() - after.keys():
                raise CannotBeCut(
                    f"module {unit!r} removes entries from a list, dict or object that it is given, and other stages would "
                    "still have them. Set them to None, return what is left, or plan without pp"
                )
            for key, value in after.items():
                if key in before and before[key] is value:
                    continue
                if is_plain(value):
                    places.append(Entry(path, key))
                elif ATTRIBUTES not in path or not any(map(attribute_tensors, leaves_of(value))):
                    # each stage has its part of a cache
                    raise CannotBeCut(
                        f"module {unit!r} puts a {type(value).__name__} into a list, dict or object that it is given. Other stages "
                        "would not have it: put tensors or plain values there, or plan without pp"
                    )
        return {f"{_GIVEN}{number}": entry for number, entry in enumerate(places)}


def check_sendable(unit: str, output: Any, given: Any) -> None:
    """Check that the output of a unit can be sent. It may return objects that it was given: each stage has its part of a cache.

    Raises CannotBeCut: an object contains tensors that pytree does not find.
    """
    inputs = {id(leaf) for leaf in leaves_of(given)}
    for leaf in leaves_of(output):
        if id(leaf) not in inputs and attribute_tensors(leaf):
            raise CannotBeCut(
                f"module {unit!r} returns a {type(leaf).__name__} that holds tensors. It cannot be sent to another stage. "
                "Return tensors in tuples, lists, dicts or dataclasses, register the class with torch.utils._pytree, or plan "
                "without pp"
            )


def check_backward_hooks(model: nn.Module, units: Sequence[str]) -> None:
    """Refuse (CannotBeCut) backward hooks of modules around units: a stage would call them for its part of the module."""
    for path, module in modules_outside(model, units):
        hooks = (*module._backward_hooks.values(), *module._backward_pre_hooks.values())
        if hooks and any(unit.startswith(f"{path}." if path else "") for unit in units):
            hook = getattr(hooks[0], "__qualname__", hooks[0])
            raise CannotBeCut(
                f"module {path or type(model).__name__!r} has a backward hook ({hook}), and its "
                "modules may be on several stages, each of which would call it. Hook the modules inside of it, do after backward() "
                "what the hook does, or plan without pp"
            )


def check_grown(
    grown: Mapping[tuple[str, int], frozenset[str]], used: frozenset[tuple[str, int, str, int]]
) -> None:
    """Refuse (CannotBeCut) code outside that reads containers a unit appends to: other stages do not have the new tensors."""
    for unit, call, path, _ in sorted(used):
        if path in grown.get((unit, call), ()):
            inside, _, name = path.partition(":")
            raise CannotBeCut(
                f"module {f'{unit}.{inside}' if inside else unit!r} adds tensors to its {name!r} in its forward, and code outside "
                "reads them there. Other stages do not have these tensors. Return them, assign the attribute anew in each forward, "
                "or plan without pp"
            )
