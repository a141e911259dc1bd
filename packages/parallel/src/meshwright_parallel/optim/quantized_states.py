"""Optimizers of torchao, whose states are quantized in blocks of each rank's part, and steps run compiled.

They step local tensors, as torch's elementwise optimizers do: torch.compile gets no tensors over a mesh. A checkpoint has the
dequantized values, so that any layout loads them; the first step after a load quantizes them again.
"""

from __future__ import annotations

from typing import Any

import torch

_MODULE = "torchao.optim.adam"
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are quantized, and whether their values have signs."""


def quantizes_states(optimizer: Any) -> bool:
    """Whether the optimizer is torchao's Adam or AdamW with states of 8 or 4 bits."""
    return any(cls.__module__ == _MODULE for cls in type(optimizer).__mro__)


def quantize(optimizer: Any, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
    """Quantize states of this rank's part of a parameter that were loaded as plain numbers, as the optimizer makes them."""
    for key, signed in _MOMENTS.items():
        value = entries.get(key)
        if type(value) is torch.Tensor:
            made = optimizer._new_buffer(parameter, signed)
            if type(made) is not torch.Tensor:
                made.copy_(value)
                entries[key] = made
