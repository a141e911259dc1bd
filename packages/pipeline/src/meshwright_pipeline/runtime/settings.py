"""What a user may change on the modules of a pipelined model between steps: mode, flags, hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline._torch import hook_tables, hooks_of
from meshwright_pipeline.partition.units import DROPOUTS

_NUMBERS = (int, float, type(None))
_OF_TORCH = frozenset({"training", "_is_full_backward_hook"})


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
        self._values = {m: _values(m, (bool, str, *_NUMBERS)) for m in self._modules}
        self._forwards = {m: m.__dict__.get("forward") for m in self._modules}
        # module -> number of its attributes, and the names of its flags
        self._flags: dict[nn.Module, tuple[int, tuple[str, ...]]] = {}

    def key(self) -> tuple[Any, ...]:
        """What decides which code runs; numbers do not count, many forwards change some."""
        return tuple(map(self._key, self._modules))

    def _key(self, module: nn.Module) -> tuple[Any, ...]:
        attributes = module.__dict__
        flags_of = self._flags.get(module)
        if flags_of is None or flags_of[0] != len(attributes):
            flags_of = self._flags[module] = len(attributes), tuple(_values(module, (bool, str)))
        drops = isinstance(module, DROPOUTS) and 0 < module.p < 1
        hooks = tuple(map(tuple, hook_tables(module)))
        parts = tuple(map(id, module._modules.values()))
        flags = tuple(map(attributes.get, flags_of[1]))
        return module.training, drops, flags, hooks, parts, id(attributes.get("forward"))

    def copy_to(self, model: nn.Module, skeleton: nn.Module) -> None:
        """Change a skeleton as the user has changed the model.

        Raises UnsupportedError: a module was added or removed, or has another `forward`.
        """
        modules = dict(model.named_modules())
        if tuple(modules.values()) != self._modules:
            raise UnsupportedError(
                "modules of a model in pipeline stages were added, removed or replaced after parallelize; change them before "
                "parallelize, or plan without pp"
            )
        for (name, module), meta in zip(modules.items(), skeleton.modules(), strict=True):
            if module.__dict__.get("forward") is not self._forwards[module]:
                raise UnsupportedError(
                    f"forward of module {name!r} was replaced after parallelize, and the other stages do not know it; replace it "
                    "before parallelize, or plan without pp"
                )
            meta.training = module.training
            if isinstance(module, DROPOUTS):
                meta.__dict__["p"] = module.p
            before = self._values[module]
            values = _values(module, (bool, str, *_NUMBERS))
            meta.__dict__.update((key, value) for key, value in values.items() if before.get(key) != value)
            tables = zip(hook_tables(module), hook_tables(meta), self._hooks[module], strict=True)
            for table, copied, there in tables:
                for number in set(copied).difference(table):
                    del copied[number]
                copied.update((number, hook) for number, hook in table.items() if number not in there)


def _values(module: nn.Module, kinds: tuple[type, ...]) -> dict[str, Any]:
    return {
        key: value for key, value in module.__dict__.items() if type(value) in kinds and key not in _OF_TORCH
    }
