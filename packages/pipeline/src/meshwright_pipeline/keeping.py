"""Buffers that the code between units writes: every rank runs some of that code, and that of the last stage all of it.

So they are told to the others behind a step. Where the code behind the units runs once more, on the whole batch, they are set
back before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from meshwright_dtensor.global_tensor import GlobalTensor
from meshwright_pipeline._torch import tensors_in

Tensor = torch.Tensor
Place = tuple[str, str]
"""The path of a module, and the name of its buffer."""


class Writes:
    """Buffers outside of units, as they are now.

    Args:
        model: whose they are.
        units: names of its units.
    """

    def __init__(self, model: nn.Module, units: Sequence[str]) -> None:
        inside = tuple(f"{unit}." for unit in units)
        self._parts = {
            path: part
            for path, part in model.named_modules()
            if path not in units and not path.startswith(inside)
        }
        self._before = {
            (path, name): (buffer, buffer._version)
            for path, part in self._parts.items()
            for name, buffer in _buffers(part).items()
        }

    def found(self) -> dict[Place, Tensor]:
        """Those that have been written since, and their values."""
        return {
            (path, name): buffer
            for path, part in self._parts.items()
            for name, buffer in _buffers(part).items()
            if (known := self._before.get((path, name))) is not None
            and (known[0] is not buffer or known[1] != buffer._version)
        }


def _buffers(part: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in tensors_in(part)[1].items() if buffer is not None}


def held(model: nn.Module, places: Iterable[Place]) -> list[Tensor]:
    """The values of buffers, whole."""
    found = [tensors_in(model.get_submodule(path))[1][name] for path, name in places]
    return [t.full_tensor() if isinstance(t, GlobalTensor) else t for t in found]


def put(model: nn.Module, places: Iterable[Place], values: Iterable[Tensor]) -> None:
    """Give buffers these values, in the memory that they have where that fits."""
    for (path, name), value in zip(places, values, strict=True):
        buffers = tensors_in(model.get_submodule(path))[1]
        old = buffers[name]
        if type(old) is type(value) and old.shape == value.shape and old.dtype == value.dtype:
            with torch.no_grad():
                old.copy_(value)
        else:
            buffers[name] = value
