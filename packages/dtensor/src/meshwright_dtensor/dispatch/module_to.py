"""Allows `module.to(dtype)` without effect inside a forward: some models cast a router to its own dtype in every call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.tensor.staged import Staged


@dataclass
class KeptApply:
    """Replaces a module's `_apply`, which cannot swap mesh or fake parameters: conversions without effect pass."""

    module: nn.Module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        for child in self.module.children() if recurse else ():
            child._apply(fn)
        for name, parameter in self.module._parameters.items():
            self._check(fn, f"parameter {name!r}", parameter)
        for name, buffer in self.module._buffers.items():
            # a buffer of another stage, or of this one, stays the object that all ranks know
            if isinstance(buffer, Staged):
                self._check(fn, f"buffer {name!r}", buffer)
            else:
                self.module._buffers[name] = None if buffer is None else fn(buffer)
        return self.module

    def _check(self, fn: Callable[[torch.Tensor], torch.Tensor], what: str, x: Any) -> None:
        """Refuse a conversion with an effect."""
        if x is None:
            return
        before = torch.empty(0, dtype=x.dtype, device=x.device)
        after = fn(before)
        if (after.dtype, after.device) != (before.dtype, before.device):
            raise UnsupportedError(
                f"{what} of a {type(self.module).__name__} is {before.dtype} on {before.device} and would become "
                f"{after.dtype} on {after.device}; convert the model before it is parallelized"
            )


def install_module_to(model: nn.Module) -> None:
    """Let the modules of a parallel model be converted to their own dtype and device; idempotent.

    All of them: which modules have parameters on this rank differs between the ranks of a pipeline.
    """
    for module in model.modules():
        kept: Any = module
        kept._apply = KeptApply(module)
        kept.register_backward_hook = _refuse_old_hook


def _refuse_old_hook(hook: Any) -> NoReturn:
    raise UnsupportedError(
        "register_backward_hook of a parallel model: torch calls such a hook with this rank's part of a gradient; use "
        "register_full_backward_hook, which gives the whole"
    )
