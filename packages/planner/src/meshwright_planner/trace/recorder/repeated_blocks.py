"""Repeated blocks of a model: of one class, with equal submodules, sizes and attributes, in one list."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright_dtensor.model.blocks import has_forward
from meshwright_planner import _torch

MIN_MEMBERS = 3
"""Fewest members of a family: the first two and the last always run."""

_NUMBERS = ("idx", "index", "layer_id", "layer_number", "block_id")
"""Parts of names of attributes that only hold the number of the block."""

_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, complex, bytes)


def families(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Name of a block -> (name of the first block of its family, whether it is the last)."""
    members_of: dict[str, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members: dict[Any, list[str]] = {}
        for key, child in module.named_children():
            held = next(child.children(), None) is not None and next(child.parameters(), None) is not None
            # other modules are never called
            if held and has_forward(child):
                marks = _signature(child)
                if marks is not None:
                    members.setdefault(marks, []).append(f"{name}.{key}" if name else key)
        for family in members.values():
            if len(family) >= MIN_MEMBERS:
                members_of.update((block, (family[0], block == family[-1])) for block in family)
    return members_of


def _signature(block: nn.Module) -> Any:
    """Equal for blocks of one family; None if a block has hooks that cannot be compared."""
    hooks = _torch.hooks_inside(block)
    if hooks is None:
        return None
    parts: list[Any] = [hooks]
    order: dict[int, int] = {}
    for name, module in block.named_modules(remove_duplicate=False):
        attributes = tuple(
            (key, _attribute(key, value)) for key, value in vars(module).items() if not key.startswith("_")
        )
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, order.setdefault(id(t), len(order)))
            for table in _torch.own_tensors(module)
            for key, t in table.items()
            if t is not None
        )
        parts.append((name, type(module), attributes, tensors))
    return tuple(parts)


def _attribute(key: str, value: Any) -> Any:
    if type(value) is int and any(word in key for word in _NUMBERS):
        return "which"
    if isinstance(value, _SIMPLE):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)) and all(isinstance(x, _SIMPLE) for x in value):
        return tuple(value)
    return id(value)
