"""Mixed precision on one device: the reference that a plan with `precision` is verified against."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.model.precision import cast_buffers
from meshwright_parallel._torch.core import map_tensors


class MixedReference:
    """A low-precision copy of a float32 model: it computes, and the float32 model is trained.

    Args:
        master: holds the float32 weights, and gets the gradients.
        dtype: of the copy.
    """

    def __init__(self, master: nn.Module, dtype: torch.dtype) -> None:
        self.master, self.dtype = master, dtype
        self.model = copy.deepcopy(master)
        cast = cast_buffers(self.model)
        for parameter in self.model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for module in self.model.modules():
            for name, buffer in list(module.named_buffers(recurse=False)):
                if id(buffer) in cast:
                    setattr(module, name, buffer.to(dtype))

    def inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Refresh the copy's weights from the master; returns the arguments in the copy's precision."""
        with torch.no_grad():
            for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
                parameter.grad = None
                parameter.copy_(master)
        return map_tensors(lambda _, t: t.to(self.dtype) if t.dtype == torch.float32 else t, args, kwargs)

    def accumulate_gradients(self) -> None:
        """Add the copy's gradients to those of the master, in float32."""
        for parameter, master in zip(self.model.parameters(), self.master.parameters(), strict=True):
            if parameter.grad is not None:
                gradient = parameter.grad.to(master.dtype)
                master.grad = gradient if master.grad is None else master.grad + gradient
