"""Run a model once on substituted tensors, and restore it: its modules' attributes, and the random generators.

A run may register hooks, replace layers, or append to lists of modules. Only one rank plans. A change that its recording left
would exist on that rank only, and the ranks would run different programs.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.devices import default_device
from meshwright_dtensor.dispatch.module_to import KeptApply
from meshwright_dtensor.model.device import forked_random
from meshwright_planner import _torch

Swap = Callable[[torch.Tensor], torch.Tensor]


@contextlib.contextmanager
def borrowed(model: nn.Module, swap: Swap) -> Iterator[None]:
    """Inside, every parameter and buffer of `model` is replaced by `swap(it)`; tied ones stay tied.

    On exit, the modules have the same parameters, buffers, children, hooks and attributes as before, with the same contents
    (see `ModuleState`), and the random generators of torch, numpy and Python have their old state.
    """
    modules = list(model.modules())
    before = ModuleState(modules)

    # a tensor's hash is its id
    @functools.cache
    def once(tensor: torch.Tensor) -> torch.Tensor:
        new = swap(tensor)
        plain = isinstance(tensor, nn.Parameter) and not isinstance(new, nn.Parameter)
        return nn.Parameter(new, tensor.requires_grad) if plain else new

    with _generators():
        try:
            for module in modules:
                for table in _torch.own_tensors(module):
                    for name, tensor in table.items():
                        if tensor is not None:
                            table[name] = once(tensor)  # type: ignore[assignment]
                # a forward may call to() on a module (routers)
                if _torch.own_tensors(module)[0]:
                    _torch.convert_by(module, KeptApply(module))
            yield
        finally:
            before.put_back()


@contextlib.contextmanager
def _generators() -> Iterator[None]:
    with contextlib.ExitStack() as restore:
        restore.callback(random.setstate, random.getstate())
        restore.callback(torch.set_rng_state, torch.get_rng_state())
        if (numpy := sys.modules.get("numpy")) is not None:
            restore.callback(numpy.random.set_state, numpy.random.get_state())
        record = default_device()
        if record.in_use():
            restore.enter_context(forked_random(record.current()))
        yield


_TABLES = (dict, OrderedDict, defaultdict, Counter)
_ROWS = (list, set, deque)
_FUNCTIONS = (types.FunctionType, types.MethodType)
_LEFT = (torch.Tensor, nn.Module, type, types.ModuleType, *_FUNCTIONS, *weakref.ProxyTypes)


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
