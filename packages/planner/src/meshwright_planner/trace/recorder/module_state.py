"""Snapshot and restore of module attributes: a run may register hooks, replace layers, or append to lists of modules.

Only one rank plans. A change that its recording left would exist on that rank only, and the ranks would run different programs.
"""

from __future__ import annotations

import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_TABLES = (dict, OrderedDict, defaultdict, Counter)
_ROWS = (list, set, deque)
_LEFT = (
    torch.Tensor, nn.Module, type, types.ModuleType, types.FunctionType, types.MethodType, *weakref.ProxyTypes
)  # fmt: skip


class ModuleState:
    """The attributes of modules and their contents: tables of hooks and children, and nested lists, dicts and sets.

    Included are attributes of other Python objects that a module holds (a loss tracker, a cache, a configuration), but not of
    objects inside those. Not included are tensor data, memory owned by C++, and attributes of classes.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}
        """id -> (container, copy of its contents); both stay alive, so that ids stay unique."""
        for module in modules:
            self._note(vars(module), True)

    def put_back(self) -> None:
        """Restore the contents of every container, with the same objects."""
        for container, held in self._saved.values():
            if not _same(container, held):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(held)

    def _note(self, value: Any, objects: bool) -> None:
        """Save the contents of `value`, recursively; `objects`: also attributes of objects in it."""
        kind = type(value)
        if id(value) in self._saved:
            return
        if kind in _TABLES:
            inner: Iterable[Any] = value.values()
            self._saved[id(value)] = (value, dict(value))
        elif kind in _ROWS:
            inner = value
            self._saved[id(value)] = (value, list(value))
        elif kind is tuple:
            inner = value
        elif objects and not issubclass(kind, _LEFT) and type(getattr(value, "__dict__", None)) is dict:
            self._note(value.__dict__, False)
            return
        else:
            return
        for item in inner:
            self._note(item, objects)


def _same(container: Any, held: Any) -> bool:
    """Whether both hold the same objects in the same order."""
    if len(container) != len(held) or any(a is not b for a, b in zip(container, held)):
        return False
    return not isinstance(held, dict) or all(a is b for a, b in zip(container.values(), held.values()))
