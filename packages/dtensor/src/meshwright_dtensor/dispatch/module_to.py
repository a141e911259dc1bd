"""Allows `module.to(dtype)` without effect inside a forward: some models cast a router to its own dtype in every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.parameter import MeshParameter


@dataclass
class KeptApply:
    """Replaces a module's `_apply`, which cannot swap mesh or fake parameters: conversions without effect pass."""

    module: nn.Module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in self.module.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self.module._parameters.items():
            if parameter is None:
                continue
            before = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
            after = fn(before)
            if (after.dtype, after.device) != (before.dtype, before.device):
                raise UnsupportedError(
                    f"parameter {name!r} of a {type(self.module).__name__} is {before.dtype} on {before.device} and would become "
                    f"{after.dtype} on {after.device}; convert the model before it is parallelized"
                )
        for name, buffer in self.module._buffers.items():
            self.module._buffers[name] = None if buffer is None else fn(buffer)
        return self.module


def install_module_to(model: nn.Module) -> None:
    """Let modules with mesh parameters be converted to their own dtype and device; idempotent."""
    for module in model.modules():
        if any(isinstance(p, MeshParameter) for p in module._parameters.values()):
            kept: Any = module
            kept._apply = KeptApply(module)
