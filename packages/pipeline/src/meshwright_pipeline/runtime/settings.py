"""What a user may change on the modules of a pipelined model between steps: mode, flags, options, functions, hooks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import hook_tables, hooks_of
from meshwright_pipeline.hook_code import refers_to_module
from meshwright_pipeline.partition.units import DROPOUTS

_FLAGS = (bool, str)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, partial)
_COPIED = (*_FLAGS, int, float, type(None), *_FUNCTIONS)
_OTHERS = frozenset({"training", "_is_full_backward_hook", "forward"})
"""Attributes of a module that are compared by themselves."""


class Settings:
    """The settings of a model, seen against those that it had when it was divided into stages.

    Attributes:
        own_hooks: module -> ids of the forward hooks that meshwright has registered.
    """

    def __init__(self, model: nn.Module, before: Mapping[nn.Module, frozenset[int]]) -> None:
        """`before`: module -> ids of the forward hooks of the user."""
        self._modules = tuple(model.modules())
        self.own_hooks = {m: frozenset(hooks_of(m)) - before.get(m, frozenset()) for m in self._modules}
        self._hooks = {m: [frozenset(table) for table in hook_tables(m)] for m in self._modules}
        self._values = {m: _values(m.__dict__, _COPIED) for m in self._modules}
        # by id; the dicts are kept, so that no other gets the id
        self._options: dict[int, tuple[dict[str, Any], dict[str, Any]]] = {
            id(options): (options, _values(options, _COPIED))
            for m in self._modules
            for _, options in _options(m)
        }
        self._forwards = {m: m.__dict__.get("forward") for m in self._modules}
        self._with_new_forward: set[nn.Module] = set()
        # module -> types of its attributes, and the names of its flags and functions, and of its options
        self._names: dict[nn.Module, tuple[list[type], tuple[str, ...], tuple[str, ...]]] = {}
        self._dropouts = frozenset(m for m in self._modules if isinstance(m, DROPOUTS))

    def key(self) -> tuple[Any, ...]:
        """What decides which code runs; numbers do not count, many forwards change some."""
        options: dict[int, dict[str, Any]] = {}
        modules = tuple([self._key(module, options) for module in self._modules])
        return modules, tuple([tuple(_values(values, _FLAGS).items()) for values in options.values()])

    def _key(self, module: nn.Module, options: dict[int, dict[str, Any]]) -> tuple[Any, ...]:
        """That of one module; its options, which others may share, go to `options`, by the ids of the attributes."""
        attributes = module.__dict__
        names, types = self._names.get(module), [*map(type, attributes.values())]
        if names is None or names[0] != types:
            named = tuple(_values(attributes, (*_FLAGS, *_FUNCTIONS)))
            names = self._names[module] = types, named, tuple([name for name, _ in _options(module)])
        for name in names[2]:
            value = attributes.get(name)
            if id(value) not in options:
                options[id(value)] = _options_of(value) or {}
        drops = module in self._dropouts and 0 < module.p < 1
        tables = hook_tables(module)
        hooks = tuple(map(tuple, tables)) if any(tables) else ()
        parts = tuple(map(id, module._modules.values()))
        flags = tuple([_code(attributes[name]) for name in names[1]]) if names[1] else ()
        return attributes["training"], drops, flags, hooks, parts, id(attributes.get("forward"))

    def copy_to(self, model: nn.Module, skeleton: nn.Module) -> None:
        """Change a skeleton as the user has changed the model.

        Raises UnsupportedError: a module was added or removed, or has another `forward` that is not a method of any module.
        """
        modules = dict(model.named_modules())
        if tuple(modules.values()) != self._modules:
            raise UnsupportedError(
                "modules of a model in pipeline stages were added, removed or replaced after parallelize; change them before "
                "parallelize, or plan without pp"
            )
        for (name, module), meta in zip(modules.items(), skeleton.modules(), strict=True):
            self._copy_forward(name, module, meta)
            meta.training = module.training
            if isinstance(module, DROPOUTS):
                meta.__dict__["p"] = module.p
            _copy_changes(module.__dict__, self._values[module], meta.__dict__)
            for key, options in _options(module):
                _, before = self._options.get(id(options), ({}, {}))
                _copy_changes(options, before, _options_of(meta.__dict__.get(key)) or {})
            tables = zip(hook_tables(module), hook_tables(meta), self._hooks[module], strict=True)
            for table, copied, there in tables:
                for number in set(copied).difference(table):
                    del copied[number]
                copied.update((number, hook) for number, hook in table.items() if number not in there)

    def _copy_forward(self, name: str, module: nn.Module, meta: nn.Module) -> None:
        forward = module.__dict__.get("forward")
        if forward is self._forwards[module] and module not in self._with_new_forward:
            return
        self._with_new_forward.add(module)
        if forward is None:
            meta.__dict__.pop("forward", None)
        # what wraps the function of its class, as autocast does
        elif (
            isinstance(forward, MethodType)
            and forward.__self__ is module
            and not refers_to_module(forward.__func__)
        ):
            meta.__dict__["forward"] = MethodType(forward.__func__, meta)
        else:
            raise UnsupportedError(
                f"forward of module {name!r} was replaced after parallelize, by a function for this module alone, which the other "
                "stages do not have; replace it before parallelize, or by a method that uses its argument self, or plan without pp"
            )


def _values(attributes: Mapping[str, Any], kinds: tuple[type, ...]) -> dict[str, Any]:
    return {key: value for key, value in attributes.items() if type(value) in kinds and key not in _OTHERS}


def _code(value: Any) -> Any:
    """A flag itself; of a function its code: a forward may make a new one in every step."""
    kind = type(value)
    if kind is bool or kind is str:
        return value
    if kind is partial:
        return _code(value.func), len(value.args), tuple(value.keywords)
    return getattr(value, "__code__", value)


def _copy_changes(given: Mapping[str, Any], before: Mapping[str, Any], there: dict[str, Any]) -> None:
    """Copy to `there` what `given` has otherwise than `before`."""
    values = _values(given, _COPIED)
    there.update((key, value) for key, value in values.items() if key not in before or before[key] != value)


def _options(module: nn.Module) -> Iterator[tuple[str, dict[str, Any]]]:
    """Attributes that hold options, such as the configuration of a model, and these as a dict."""
    for key, value in module.__dict__.items():
        options = None if key.startswith("_") else _options_of(value)
        if options is not None:
            yield key, options


def _options_of(value: Any) -> dict[str, Any] | None:
    """The options in a dict or in an ordinary object; None of anything else."""
    if isinstance(value, (nn.Module, torch.Tensor)) or callable(value):
        return None
    # not by an attribute of its class, which may be slow
    options = value if type(value) is dict else vars(value) if hasattr(value, "__dict__") else None
    return options if type(options) is dict else None
