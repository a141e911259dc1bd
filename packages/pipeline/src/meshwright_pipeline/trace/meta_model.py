"""The skeleton of a model: its structure and code without the memory of its units; and modules emptied in place."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright_dtensor.model.precision import cast_buffers
from meshwright_pipeline._torch import remove_buffer, remove_parameter

LARGE = 1 << 20
"""Bytes of a tensor from which it is worth leaving zeros untouched."""


def skeleton(model: nn.Module, units: Iterable[str], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of `model` whose `units` hold meta tensors; what lies outside of them is copied as it is.

    Parameters and buffers of units are not copied on the way: nothing of their size is ever allocated. `dtype`: what a
    float32 model is computed in.
    """
    cast = cast_buffers(model)
    memo: dict[int, Any] = {}
    keep: list[torch.Tensor] = []  # ids in memo must stay theirs
    for unit in units:
        module = model.get_submodule(unit)
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo:
                keep.append(tensor)
                casts = tensor.dtype == torch.float32 and (
                    isinstance(tensor, nn.Parameter) or id(tensor) in cast
                )
                memo[id(tensor)] = _as_meta(tensor, dtype if casts else tensor.dtype)
    made = copy.deepcopy(model, memo)
    if dtype != torch.float32:
        for parameter in made.parameters():  # those outside of units
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
    for unit in units:
        move_to_meta(made.get_submodule(unit))
    return made


def _as_meta(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    meta = torch.empty_like(tensor, dtype=dtype, device="meta")
    return nn.Parameter(meta, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else meta


def move_to_meta(
    module: nn.Module, left: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, t: t
) -> None:
    """Make the parameters and buffers of a module, and of all inside of it, ordinary attributes on the meta device.

    They are no part of `parameters()` or `state_dict()` any more, but code may go on asking for their shape and dtype.

    Args:
        left: what stands there in the place of a meta tensor, by its name in `module`.
    """
    for path, part in module.named_modules():
        dot = f"{path}." if path else ""
        for name, parameter in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            remove_parameter(part, name)
            part.__dict__[name] = left(dot + name, parameter.detach().to("meta"))
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            remove_buffer(part, name)
            part.__dict__[name] = left(dot + name, buffer.detach().to("meta"))


def meta_tensors(module: nn.Module) -> list[tuple[nn.Module, str, torch.Tensor]]:
    """(part, name, meta tensor) of everything that `move_to_meta` left in a module."""
    return [
        (part, name, value)
        for part in module.modules()
        for name, value in part.__dict__.items()
        if isinstance(value, torch.Tensor) and value.is_meta
    ]


def _zeros(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Zeros; large ones are memory that the system finds as it is touched: of many experts a few are read."""
    nbytes = like.numel() * like.element_size()
    if device.type != "cpu" or nbytes < LARGE:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    return torch.from_numpy(np.zeros(nbytes, np.uint8)).view(like.dtype).view(like.shape)  # calloc


@contextlib.contextmanager
def with_zeros(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, an emptied module has zeros on `device`, for code that does not run on the meta device."""
    held = meta_tensors(module)
    for part, name, value in held:
        part.__dict__[name] = _zeros(value, device)
    try:
        yield
    finally:
        for part, name, value in held:
            part.__dict__[name] = value


def put_expanded_zeros(module: nn.Module, device: torch.device) -> None:
    """Give an emptied module zeros of no memory on `device`: code between units reads its parameters itself."""
    for part, name, value in meta_tensors(module):
        part.__dict__[name] = torch.zeros((), dtype=value.dtype, device=device).expand(value.shape)


@contextlib.contextmanager
def back_on_meta(module: nn.Module) -> Iterator[None]:
    """Inside, what `put_expanded_zeros` has put into a module is on the meta device again."""
    held = [
        (part, name, value)
        for part in module.modules()
        for name, value in part.__dict__.items()
        if isinstance(value, torch.Tensor) and not value.is_meta
    ]
    for part, name, value in held:
        part.__dict__[name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
    try:
        yield
    finally:
        for part, name, value in held:
            part.__dict__[name] = value


def unit_tensors(module: nn.Module) -> list[torch.Tensor]:
    """The tensors that `put_expanded_zeros` left in a module."""
    return [v for part in module.modules() for v in part.__dict__.values() if isinstance(v, torch.Tensor)]
