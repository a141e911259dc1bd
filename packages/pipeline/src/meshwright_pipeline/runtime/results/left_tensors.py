"""Tensors that a step leaves in attributes of modules. Each rank has those of its part of the forward, or of its last microbatch,
so between the steps they cannot be read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshwright_pipeline._torch import WeakTensorKeys, computes_weight
from meshwright_pipeline.module_state import Place
from meshwright_pipeline.pytrees import NO_STATE, map_leaves, tensors_of, tensors_within
from meshwright_pipeline.runtime.results.step_output import DroppedOutput

_WHY = (
    "{!r}, which the forward of {} leaves in an attribute: in a pipeline each stage has its own, of its last microbatch. Return it "
    'from the forward (set pipeline.outputs to "all" in the plan to get it from training steps too), or register it as a buffer'
)

_MISSING = object()

_Slot = tuple[Any, Any]
"""A list or dict, and the index or key of one of its entries."""


class LeftTensors:
    """Hides what steps leave in attributes of a model between the steps."""

    def __init__(self) -> None:
        self._hidden: list[tuple[_Slot, Any, Any]] = []
        self._left: Mapping[Place, Tensor] = {}
        # activations of the step before, maybe
        self._before = WeakTensorKeys()

    def show(self) -> None:
        """Before a step: put back what the code of the model has left."""
        while self._hidden:
            (container, key), shown, hidden = self._hidden.pop()
            if _entry(container, key) is shown:
                if hidden is _MISSING:
                    del container[key]
                else:
                    container[key] = hidden

    def watch(self, model: nn.Module, left: Mapping[Place, Tensor]) -> None:
        """When a step begins: what is there already will not be hidden. `left`: see Profile.left_anywhere."""
        self._left = left
        held = [_entry(vars(model.get_submodule(path)), name) for path, name in left]
        self._before = WeakTensorKeys()
        for tensor in tensors_within(held):
            self._before[tensor] = True

    @contextlib.contextmanager
    def shown(self, model: nn.Module, device: torch.device) -> Iterator[None]:
        """Inside, what is hidden is there."""
        self.show()
        try:
            yield
        finally:
            self.hide(model, device)

    def hide(self, model: nn.Module, device: torch.device) -> None:
        """After a step: put tensors that cannot be read in the place of those that it has left."""
        for (path, name), like in self._left.items():
            module = model.get_submodule(path)
            if computes_weight(module, name):
                continue
            why = _WHY.format(name, f"module {path!r}" if path else "the model")
            dropped = partial(_dropped, why, device, self._before)
            attributes = vars(module)
            value = _entry(attributes, name)
            if value is None or value is _MISSING or isinstance(value, Tensor):
                # where this rank has run another part of the forward, it is not there, or that of an earlier step
                tensor = value if isinstance(value, Tensor) else like
                self._put(attributes, name, DroppedOutput.of(_without_values(tensor), device, why))
                continue
            for container, key in list(_slots(attributes, name, set())):
                if any(tensor not in self._before for tensor in tensors_of(container[key])):
                    self._put(container, key, map_leaves(dropped, container[key]))

    def _put(self, container: Any, key: Any, shown: Any) -> None:
        self._hidden.append(((container, key), shown, _entry(container, key)))
        container[key] = shown


def _dropped(why: str, device: torch.device, before: Any, _: int, tensor: Tensor) -> Tensor:
    return tensor if tensor in before else DroppedOutput.of(_without_values(tensor), device, why)


def _without_values(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def _slots(container: Any, key: Any, seen: set[int]) -> Iterator[_Slot]:
    """The entries with tensors in `container[key]`, also in its lists, dicts and objects."""
    value = _entry(container, key)
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, list):
        inside: Any = range(len(value))
    elif isinstance(value, dict):
        inside = list(value)
    elif isinstance(value, NO_STATE) or not hasattr(value, "__dict__"):
        if tensors_of(value):
            yield container, key
        return
    else:
        value, inside = vars(value), list(vars(value))
    for each in inside:
        yield from _slots(value, each, seen)


def _entry(container: Any, key: Any) -> Any:
    if isinstance(container, dict):
        return container.get(key, _MISSING)
    return container[key] if key < len(container) else _MISSING
