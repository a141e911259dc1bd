"""Optimizers of torchao, whose states are quantized in blocks, and steps run compiled: how they are stepped in whole blocks.

A checkpoint has the dequantized values, so that any layout loads them; the first step after a load quantizes them again, to the
same codes and scales.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from meshwright_parallel.optim.whole_blocks import Blocks, marked_blocks

_MODULE = "torchao.optim.adam"
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are quantized, and whether their values have signs."""
_SMALLEST = 4096
"""Elements from which torchao quantizes the state of a parameter."""


def blocks_of(optimizer: Any) -> Blocks | None:
    """How the optimizer quantizes its states in blocks: torchao's Adam and AdamW of 8 or 4 bits, and marked ones; else None."""
    if any(cls.__module__ == _MODULE for cls in type(optimizer).__mro__):
        size = optimizer.block_size
        return Blocks(size, (), partial(_is_quantized, size), partial(_make_as_one_device, size), _quantize)
    return marked_blocks(optimizer)


def _is_quantized(block: int, numel: int) -> bool:
    """Whether torchao quantizes the state of a parameter of one device with so many elements."""
    return numel >= _SMALLEST and numel % block == 0


def _make_as_one_device(block: int, copied: Any, numel_of: Callable[[torch.Tensor], int | None]) -> None:
    """Let a copy of the optimizer decide by whole parameters: torchao goes by the size of its argument, here this rank's part."""

    def new_buffer(p: torch.Tensor, signed: bool) -> Any:
        numel = numel_of(p)
        quantized = _is_quantized(block, p.numel() if numel is None else numel)
        return copied._subclass_zeros(p, signed, block) if quantized and p.numel() else torch.zeros_like(p)

    copied._new_buffer = new_buffer


def _quantize(copied: Any, local: torch.Tensor, entries: dict[str, Any]) -> None:
    """Quantize states that were loaded as plain numbers, as the optimizer makes them."""
    for key, signed in _MOMENTS.items():
        value = entries.get(key)
        if type(value) is torch.Tensor:
            made = copied._new_buffer(local, signed)
            if type(made) is not torch.Tensor:
                made.copy_(value)
                entries[key] = made
