"""Trees of tensors that modules take and return: pytree containers, and objects with fields (dataclasses, SimpleNamespace)."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import torch

from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import is_container, pytree

NO_STATE = (torch.Tensor, torch.nn.Module, type, FunctionType, MethodType, partial)
"""Types whose objects have attributes that no call is given to write to."""

_PACKAGE = f"{__name__.partition('.')[0]}."
_PLAIN = (
    *(
        bool,
        int,
        float,
        complex,
        str,
        bytes,
        range,
        slice,
        Enum,
        type,
        FunctionType,
        BuiltinFunctionType,
        torch.Size,
    ),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types of values that are the same on all stages."""


def map_leaves(change: Callable[[int, torch.Tensor], Any], tree: Any) -> Any:
    """The same tree with every tensor replaced by `change(index of the leaf, tensor)`."""
    return _mapped(change, tree, itertools.count())


def _mapped(change: Callable[[int, torch.Tensor], Any], tree: Any, indices: Iterator[int]) -> Any:
    leaves, spec = pytree.tree_flatten(tree, is_leaf=_is_size)
    changed = []
    for leaf in leaves:
        fields = _fields(leaf)
        if fields is None:
            index = next(indices)
            changed.append(change(index, leaf) if isinstance(leaf, torch.Tensor) else leaf)
        else:
            changed.append(copied := copy.copy(leaf))
            for name, value in fields.items():
                # a dataclass may be frozen
                object.__setattr__(copied, name, _mapped(change, value, indices))
    return pytree.tree_unflatten(changed, spec)


def _is_size(tree: Any) -> bool:
    # pytree makes it a tuple
    return type(tree) is torch.Size


_VALUES = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, torch.Size),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format),
    }
)
"""Types of most leaves that are no tensors. None of them has fields or attributes."""

_LEAVES = _VALUES | {torch.Tensor, torch.nn.Parameter}


def is_value(x: Any) -> bool:
    """Whether something is of a plain type: no tensor, nor anything that could hold one."""
    return type(x) in _VALUES


def leaves_of(tree: Any) -> list[Any]:
    """The leaves of a tree in order."""
    # profiles ask for the tensors of each operation several times
    kind = type(tree)
    if kind in _LEAVES:
        return [tree]
    leaves: list[Any] = []
    if kind is list or kind is tuple or kind is dict:
        for item in tree.values() if kind is dict else tree:
            if type(item) in _LEAVES:
                leaves.append(item)
            else:
                leaves += leaves_of(item)
        return leaves
    for leaf in pytree.tree_leaves(tree, is_leaf=_is_size) if is_container(kind) else (tree,):
        fields = _fields(leaf)
        leaves += [leaf] if fields is None else leaves_of(fields)
    return leaves


def is_stand_in(value: Any) -> bool:
    """Whether an object stands for an integer, in a search for repeated units."""
    return type(value).__module__.startswith(_PACKAGE)


def is_plain(value: Any) -> bool:
    """Whether a value, alone or in lists, tuples and dicts, has nothing inside that only one stage could have."""
    return all(
        all(map(is_plain, leaf))
        if issubclass(kind := type(leaf), (set, frozenset))
        else leaf is None
        or (issubclass(kind, (torch.Tensor, *_PLAIN)) and getattr(leaf, "__closure__", None) is None)
        or is_stand_in(leaf)
        for leaf in leaves_of(value)
    )


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors of a tree in order."""
    return [x for x in leaves_of(tree) if isinstance(x, torch.Tensor)]


def _fields(leaf: Any) -> dict[str, Any] | None:
    """The fields of a dataclass or SimpleNamespace that contains tensors; None for other objects."""
    # isinstance() would count as a use of an IntProxy (see repeated_units)
    kind = type(leaf)
    if issubclass(kind, SimpleNamespace):
        fields = dict(vars(leaf))
    elif dataclasses.is_dataclass(kind) and not issubclass(kind, torch.nn.Module):
        fields = _dataclass_fields(leaf)
    else:
        return None
    return fields if any(isinstance(x, torch.Tensor) for x in leaves_of(fields)) else None


def _dataclass_fields(leaf: Any) -> dict[str, Any]:
    values = getattr(leaf, "__dict__", {})
    fields = {}
    for field in dataclasses.fields(leaf):
        if field.name in values:
            fields[field.name] = values[field.name]
        else:
            # one of slots; or not set yet, and getattr() of its class may refuse
            with contextlib.suppress(AttributeError):
                fields[field.name] = object.__getattribute__(leaf, field.name)
    return fields


def attribute_tensors(leaf: Any) -> list[torch.Tensor]:
    """The tensors in the attributes of an object of another class (a cache, for example)."""
    if issubclass(type(leaf), (torch.Tensor, torch.nn.Module, type)):
        return []
    return tensors_of(dict(getattr(leaf, "__dict__", {})))


ATTRIBUTES = "."
"""The place of the attributes of an object in a path."""


def tensors_within(tree: Any) -> Iterator[torch.Tensor]:
    """The tensors of a tree, and those in attributes of its objects and of the objects there."""
    seen: set[int] = set()
    waiting = [tree]
    while waiting:
        for leaf in leaves_of(waiting.pop()):
            # isinstance() would count as a use of an IntProxy
            kind = type(leaf)
            if kind in _VALUES:
                continue
            if issubclass(kind, torch.Tensor):
                yield leaf
            elif not (id(leaf) in seen or is_stand_in(leaf) or issubclass(kind, NO_STATE)):
                seen.add(id(leaf))
                waiting.append(dict(getattr(leaf, "__dict__", {})))


Containers = dict[tuple[Any, ...], Any]
"""Lists and dicts by their path in a tree."""


def containers_of(tree: Any) -> Containers:
    """The lists and dicts in a tree, also those in attributes of objects; attributes are a dict."""
    containers: Containers = {}
    _add_containers(tree, (), True, containers, set())
    return containers


def _add_containers(
    value: Any, path: tuple[Any, ...], attributes: bool, containers: Containers, seen: set[int]
) -> None:
    # not a closure, which would keep the containers until the next garbage collection
    kind = type(value)
    if issubclass(kind, (list, dict)):
        if id(value) in seen:
            return
        seen.add(id(value))
        containers[path] = value
    elif not issubclass(kind, tuple):
        held = getattr(value, "__dict__", None) if attributes and not issubclass(kind, NO_STATE) else None
        if type(held) is dict:
            _add_containers(held, (*path, ATTRIBUTES), False, containers, seen)
        return
    for key, item in entries_of(value).items():
        _add_containers(item, (*path, key), attributes, containers, seen)


def entries_of(container: Any) -> dict[Any, Any]:
    """The entries of a list, tuple or dict by index or key."""
    return dict(container if isinstance(container, dict) else enumerate(container))


def contents_of(tree: Any) -> list[list[Any]]:
    """What is in the lists and dicts of a tree."""
    return [list(entries_of(container).values()) for container in containers_of(tree).values()]


def full_value(value: Any) -> Any:
    """A tensor of several ranks as an ordinary one; other values as they are."""
    return value.full_tensor() if isinstance(value, GlobalTensor) else value


def differing_dims(tensor: torch.Tensor, other: torch.Tensor) -> list[int]:
    """The dims in which two tensors of the same rank have different sizes."""
    return [dim for dim, size in enumerate(tensor.shape) if other.shape[dim] != size]


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in `expanded_zeros`. Such a tensor cannot be written to."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def expanded_zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros of the shape and dtype of `like` that take no memory."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


def version_of(value: Any) -> int | None:
    """How often an ordinary tensor has been written to; None for others, and where torch does not count."""
    return value._version if type(value) is torch.Tensor and not value.is_inference() else None
