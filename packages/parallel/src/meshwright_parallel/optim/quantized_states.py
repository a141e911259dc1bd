"""Optimizers of torchao, whose states are quantized in blocks of elements that follow each other, and steps run compiled.

A part that begins and ends at borders of blocks of the whole value has the blocks of one device: under ZeRO, shards of rows of most
matrices. Of any other part torchao makes blocks of its own. They step local tensors, as torch's elementwise optimizers do:
torch.compile gets no tensors over a mesh. A checkpoint has the dequantized values, so that any layout loads them; the first step
after a load quantizes them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.sharding.boxes import single_box

_MODULE = "torchao.optim.adam"
_MOMENTS = {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}
"""The states that are quantized, and whether their values have signs."""
_SMALLEST = 4096
"""Elements from which torchao quantizes the state of a parameter."""


def quantizes_states(optimizer: Any) -> bool:
    """Whether the optimizer is torchao's Adam or AdamW with states of 8 or 4 bits."""
    return any(cls.__module__ == _MODULE for cls in type(optimizer).__mro__)


def quantize_as_one_device(local_copy: Any, layouts: Mapping[torch.Tensor, Layout]) -> None:
    """Let a copy of the optimizer make states of local parameters with the blocks of whole ones, where parts end at borders.

    torchao decides by the size of its argument whether to quantize, which would be the size of this rank's part.
    """
    make = local_copy._new_buffer

    def new_buffer(p: torch.Tensor, signed: bool) -> Any:
        layout = layouts.get(p)
        if layout is None:
            return make(p, signed)
        if not _is_quantized(layout.shape.numel(), local_copy.block_size):
            return torch.zeros_like(p)
        if p.numel() and _has_whole_blocks(layout, local_copy.block_size):
            return local_copy._subclass_zeros(p, signed, local_copy.block_size)
        return make(p, signed)

    local_copy._new_buffer = new_buffer


def _is_quantized(numel: int, block: int) -> bool:
    """Whether torchao quantizes the state of a parameter of one device with so many elements."""
    return numel >= _SMALLEST and numel % block == 0


def _has_whole_blocks(layout: Layout, block: int) -> bool:
    """Whether this rank's part is rows of the value, from a border of blocks to another one."""
    box = single_box(layout.region)
    if box is None or any((0, size) != held for size, held in zip(layout.shape[1:], box[1:], strict=True)):
        return False
    row = layout.shape[1:].numel()
    return all(rows * row % block == 0 for rows in box[0])


def quantize(optimizer: Any, parameter: torch.Tensor, entries: dict[str, Any]) -> None:
    """Quantize states of this rank's part of a parameter that were loaded as plain numbers, as the optimizer makes them."""
    for key, signed in _MOMENTS.items():
        value = entries.get(key)
        if type(value) is torch.Tensor:
            made = optimizer._new_buffer(parameter, signed)
            if type(made) is not torch.Tensor:
                made.copy_(value)
                entries[key] = made
