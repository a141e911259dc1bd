"""Blocks of a model that must do the same: of one class, with equal parts, sizes and attributes, in one list."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from meshwright_dtensor.model.blocks import has_forward
from meshwright_planner import _torch

LEAST = 3
"""Members from which a family is worth anything: the first two and the last one run whatever is known of them."""

_NUMBERS = ("idx", "index", "layer_id", "layer_number", "block_id")
"""Parts of the names of attributes that only say which of the blocks it is."""

_SIMPLE = (int, float, str, bool, type(None), torch.dtype, torch.device, complex, bytes)


def families(model: nn.Module) -> dict[str, tuple[str, bool]]:
    """Name of a block -> (name of the first of its family, whether it is the last)."""
    found: dict[str, tuple[str, bool]] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        members: dict[Any, list[str]] = {}
        for key, child in module.named_children():
            held = next(child.children(), None) is not None and next(child.parameters(), None) is not None
            if held and has_forward(child):  # others are never called
                marks = _marks(child)
                if marks is not None:
                    members.setdefault(marks, []).append(f"{name}.{key}" if name else key)
        for family in members.values():
            if len(family) >= LEAST:
                found.update((block, (family[0], block == family[-1])) for block in family)
    return found


def _marks(block: nn.Module) -> Any:
    """What must be equal for two blocks to do the same; None where one cannot tell."""
    hooks = _torch.hooks_inside(block)
    if hooks is None:
        return None
    parts: list[Any] = [hooks]
    order: dict[int, int] = {}
    for name, module in block.named_modules(remove_duplicate=False):
        attributes = tuple(
            (key, _plain(key, value)) for key, value in vars(module).items() if not key.startswith("_")
        )
        tensors = tuple(
            (key, tuple(t.shape), t.dtype, t.requires_grad, order.setdefault(id(t), len(order)))
            for table in _torch.own_tensors(module)
            for key, t in table.items()
            if t is not None
        )
        parts.append((name, type(module), attributes, tensors))
    return tuple(parts)


def _plain(key: str, value: Any) -> Any:
    if type(value) is int and any(word in key for word in _NUMBERS):
        return "which"
    if isinstance(value, _SIMPLE):
        return (type(value).__name__, value)
    if isinstance(value, (tuple, list)) and all(isinstance(x, _SIMPLE) for x in value):
        return tuple(value)
    return id(value)
