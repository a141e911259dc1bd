"""Optimizers of torchao and bitsandbytes, whose states are quantized in blocks: how they are stepped in whole blocks.

torchao's steps run compiled. A checkpoint has the dequantized values of its states, so that any layout loads them; the first step
after a load quantizes them again, to the same codes and scales. bitsandbytes has codes and scales as states of their own.
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
    """How the optimizer quantizes its states in blocks: those of torchao and bitsandbytes, and marked ones; None for any other."""
    if any(cls.__module__ == _MODULE for cls in type(optimizer).__mro__):
        size = optimizer.block_size
        return Blocks(size, (), partial(_is_quantized, size), partial(_make_as_one_device, size), _quantize)
    if _steps_elements(optimizer):
        smallest = optimizer.args.min_8bit_size
        eight = optimizer.args.optim_bits == 8
        return Blocks(
            256, ("absmax1", "absmax2"), lambda numel: eight and numel >= smallest, _decide_by_whole
        )
    return marked_blocks(optimizer)


def _steps_elements(optimizer: Any) -> bool:
    """Whether the optimizer is bitsandbytes' own of a kind that computes elementwise but for blocks, with equal options for all.

    LARS and LAMB (`max_unorm`) need norms of whole parameters. Options of single parameters are kept by number and identity.
    """
    kind = type(optimizer)
    if not kind.__module__.startswith("bitsandbytes.optim."):
        return False
    states = {cls.__name__ for cls in kind.__mro__}
    if not states & {"Optimizer1State", "Optimizer2State"} or any("AdEMAMix" in name for name in states):
        return False
    options = optimizer.mng
    single = options.pid2config or options.index2config or options.module_weight_config_triple
    return not (optimizer.args.max_unorm or optimizer.is_paged or single)


def _decide_by_whole(copied: Any, numel_of: Callable[[torch.Tensor], int | None]) -> None:
    """Let a copy of bitsandbytes' optimizer decide by whole parameters which states are of 8 bits; skip a rank's empty parts."""
    get_config, update_step = copied.get_config, copied.update_step

    def config_of(group_index: int, index: int, group: dict[str, Any]) -> Any:
        config = get_config(group_index, index, group)
        local = group["params"][index]
        large = (numel_of(local) or 0) >= config["min_8bit_size"]
        return {**config, "min_8bit_size": 0 if large else local.numel() + 1}

    def update(group: dict[str, Any], local: torch.Tensor, group_index: int, index: int) -> None:
        if local.numel():
            update_step(group, local, group_index, index)
        else:
            copied.state[local]["step"] += 1

    copied.get_config, copied.update_step = config_of, update


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
