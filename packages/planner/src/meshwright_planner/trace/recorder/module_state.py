"""What modules hold, written down and put back: a run of them may hang up hooks, replace layers, or count in lists of theirs.

One rank plans and the others do not, so whatever a watched run left behind would be there on one rank only, and the ranks would
run different programs from then on.
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


class Contents:
    """The attributes of modules, and what is in them: tables of hooks and children, lists, dicts, sets and what is in those.

    So too the attributes of other Python objects that a module holds (a tracker of losses, a cache, a configuration), but not
    those of objects further in; nor tensors, memory that C++ owns, or what the class or the program holds.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved: dict[int, tuple[Any, Any]] = {}
        """id -> (a container, a copy of what is in it); it keeps both alive, so that ids stay theirs."""
        for module in modules:
            self._note(vars(module), True)

    def put_back(self) -> None:
        """Every container holds what it held; what was the same object is it again."""
        for container, held in self._saved.values():
            if not _same(container, held):
                container.clear()
                (container.extend if isinstance(container, (list, deque)) else container.update)(held)

    def _note(self, value: Any, objects: bool) -> None:
        """Write down `value` and what it holds, and the attributes of the `objects` in it."""
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
    """Whether both hold the very same objects in the same order."""
    if len(container) != len(held) or any(a is not b for a, b in zip(container, held)):
        return False
    return not isinstance(held, dict) or all(a is b for a, b in zip(container.values(), held.values()))
