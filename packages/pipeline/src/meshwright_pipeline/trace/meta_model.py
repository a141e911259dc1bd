"""The skeleton of a model: a copy with its structure and code, but with units on the meta device."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from meshwright_dtensor.deferred.materialize import has_values
from meshwright_dtensor.devices import HOST, on_host
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.model.precision import cast_buffers
from meshwright_pipeline.pytrees import expanded_zeros
from meshwright_pipeline.trace.state.state_writes import modules_outside

Attribute = tuple[nn.Module, str, Tensor]
"""(submodule, attribute, tensor)."""

SHOWN = "named_parameters"
"""The attribute of the modules of a skeleton that lists the parameters of units too."""

_NAMES, _FLAGS = "_meshwright_parameter_names", "_meshwright_flags"

LARGE = 1 << 20
"""Tensors of at least this many bytes are allocated as untouched zero pages."""


def skeleton(model: nn.Module, units: Iterable[str], dtype: torch.dtype = torch.float32) -> nn.Module:
    """A copy of `model` in which `units` hold meta tensors. Everything outside of units is copied as it is.

    Nothing of the size of the units is allocated, not even temporarily. `dtype`: compute dtype of a float32 model.
    """
    # the tensors are kept, so that the ids in memo stay theirs
    memo, keep = _stand_ins(model, units, dtype)
    copied = copy.deepcopy(model, memo)
    if dtype != torch.float32:
        # outside of units
        for parameter in copied.parameters():
            if parameter.dtype == torch.float32:
                parameter.data = parameter.data.to(dtype)
    inside = {part for unit in units for part in copied.get_submodule(unit).modules()}
    for module in copied.modules():
        module.__dict__[_NAMES] = tuple(module._parameters)
    for unit in units:
        for path, part in model.get_submodule(unit).named_modules(prefix=unit):
            copied.get_submodule(path).__dict__[_FLAGS] = {
                name: buffer.to(HOST, copy=True)
                for name, buffer in part.named_buffers(recurse=False)
                if buffer.dtype == torch.bool and buffer.numel() == 1 and has_values(buffer)
            }
        move_to_meta(copied.get_submodule(unit))
    for module in copied.modules():
        module.__dict__[SHOWN] = partial(_named_parameters, module, module in inside)
    del keep
    return copied


def _stand_ins(
    model: nn.Module, units: Iterable[str], dtype: torch.dtype
) -> tuple[dict[int, Any], list[Tensor]]:
    """Id of a tensor -> what a skeleton has in its place; and these tensors."""
    cast = cast_buffers(model)
    memo: dict[int, Any] = {}
    keep: list[Tensor] = []
    inside = {part for unit in units for part in model.get_submodule(unit).modules()}
    # a weight that modules outside of units have too has its values there
    outside = {id(t) for part in model.modules() if part not in inside for t in _own_tensors(part)}
    for unit in units:
        module = model.get_submodule(unit)
        for tensor in (*module.parameters(), *module.buffers()):
            if id(tensor) not in memo and id(tensor) not in outside:
                keep.append(tensor)
                trained = isinstance(tensor, nn.Parameter)
                casts = tensor.dtype == torch.float32 and (trained or id(tensor) in cast)
                meta = torch.empty_like(tensor, dtype=dtype if casts else tensor.dtype, device="meta")
                memo[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if trained else meta
    for _, _, tensor in tensor_attributes(model):
        # computed from parameters by a hook before each forward, as torch.nn.utils.weight_norm does
        if not tensor.is_leaf:
            keep.append(tensor)
            memo[id(tensor)] = tensor.detach()
    return memo, keep


def _own_tensors(module: nn.Module) -> tuple[Tensor, ...]:
    return (*module.parameters(recurse=False), *module.buffers(recurse=False))


def _named_parameters(
    module: nn.Module,
    inside: bool,
    prefix: str = "",
    recurse: bool = True,
    remove_duplicate: bool = True,
) -> Iterator[tuple[str, Tensor]]:
    """`named_parameters()` in the skeleton, those of units too. `inside`: of a unit.

    Raises RuntimeError: code between units asks while those of units are on the meta device, which is not that of the model.
    Raises UnsupportedError: code between units takes all of them, which no stage has.
    """
    seen: set[Tensor] = set()
    of_units = False
    for path, part in module.named_modules(prefix=prefix) if recurse else ((prefix, module),):
        for name in part.__dict__.get(_NAMES, part._parameters):
            tensor = getattr(part, name)
            if tensor is None or (remove_duplicate and tensor in seen):
                continue
            if tensor.is_meta and not inside:
                raise RuntimeError("parameters of units are read between units")
            seen.add(tensor)
            of_units = of_units or name not in part._parameters
            yield f"{path}.{name}" if path else name, tensor
    if of_units and not inside:
        raise UnsupportedError(
            f"the forward goes through all parameters of {type(module).__name__} (to count them, say), and in a pipeline a rank "
            "has those of its stages only: do it once, before the model is made parallel. Reading the first one, for its device or "
            "its dtype, works"
        )


def show_first_parameters(
    model: nn.Module, copied: nn.Module, units: Sequence[str], device: torch.device
) -> None:
    """Let modules of `model` outside of `units` that have no parameters on this rank name their first one: zeros, which code
    between units may ask for its dtype and device. `copied`: the skeleton, whose profile tells whether it reads the value."""
    for path, module in modules_outside(model, units):
        shown = copied.get_submodule(path)
        named = ((part, name) for part in shown.modules() for name in part.__dict__[_NAMES])
        tensors = ((name, getattr(part, name)) for part, name in named)
        first = next(((name, tensor) for name, tensor in tensors if tensor is not None), None)
        if first is not None and next(module.parameters(), None) is None:
            module.__dict__[SHOWN] = partial(_or_first, module, first[0], expanded_zeros(first[1], device))


def _or_first(
    module: nn.Module, name: str, zeros: Tensor, *args: Any, **kwargs: Any
) -> Iterator[tuple[str, Tensor]]:
    held: list[tuple[str, Tensor]] = list(nn.Module.named_parameters(module, *args, **kwargs))
    # not where only its direct parameters are wanted
    return iter(held if len(args) > 1 or not kwargs.get("recurse", True) else held or [(name, zeros)])


def move_to_meta(
    module: nn.Module,
    replacement: Callable[[str, Tensor], Tensor] = lambda _, t: t,
    kept: Collection[nn.Module] = (),
) -> None:
    """Replace the parameters and buffers of a module and its submodules by attributes on the meta device.

    They are no longer part of `parameters()` or `state_dict()`, but code may still read their shape and dtype.
    `replacement`: (name in `module`, meta tensor) -> the attribute to set. `kept`: submodules to leave as they are.
    """
    for path, part in module.named_modules():
        if part in kept:
            continue
        part.__dict__.setdefault(_NAMES, tuple(part._parameters))
        # the state dicts of stages list the same buffers
        unsaved = set(part._non_persistent_buffers_set)
        dot = f"{path}." if path else ""
        for named in (part.named_parameters, part.named_buffers):
            for name, tensor in list(named(recurse=False, remove_duplicate=False)):
                nn.Module.__delattr__(part, name)
                part.__dict__[name] = replacement(dot + name, tensor.detach().to("meta"))
        part._non_persistent_buffers_set |= unsaved


def tensor_attributes(module: nn.Module) -> list[Attribute]:
    """The tensors in the attributes of a module and its submodules."""
    held = ((part, name, value) for part in module.modules() for name, value in part.__dict__.items())
    return [attribute for attribute in held if isinstance(attribute[2], Tensor)]


def meta_tensors(module: nn.Module) -> list[Attribute]:
    """The meta tensors in a module."""
    return [attribute for attribute in tensor_attributes(module) if attribute[2].is_meta]


def _zeros(like: Tensor, device: torch.device) -> Tensor:
    """Zeros. Pages of large tensors are allocated on first access: of many experts only a few are read."""
    if not on_host(device) or like.nbytes < LARGE:
        return torch.zeros(like.shape, dtype=like.dtype, device=device)
    # calloc
    return torch.from_numpy(np.zeros(like.nbytes, np.uint8)).view(like.dtype).view(like.shape)


@contextlib.contextmanager
def _replaced(held: Sequence[Attribute], change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    for part, name, value in held:
        part.__dict__[name] = change(value)
    try:
        yield
    finally:
        for part, name, value in held:
            part.__dict__[name] = value


def with_zeros(module: nn.Module, device: torch.device) -> AbstractContextManager[None]:
    """Inside, the meta tensors of a module are zeros on `device`, for code that does not run on the meta device. Flags, buffers
    of one truth value (whether a codebook has been initialised), have their values."""
    flags = {
        id(part.__dict__[name]): value
        for part in module.modules()
        for name, value in part.__dict__.get(_FLAGS, {}).items()
    }

    def stand_in(meta: Tensor) -> Tensor:
        flag = flags.get(id(meta))
        return _zeros(meta, device) if flag is None else flag.to(device, copy=True)

    return _replaced(meta_tensors(module), stand_in)


def put_expanded_zeros(module: nn.Module, device: torch.device) -> None:
    """Replace the meta tensors of a module by zeros without memory on `device`, for code between units that reads them."""
    for part, name, value in meta_tensors(module):
        part.__dict__[name] = expanded_zeros(value, device)


def back_on_meta(module: nn.Module) -> AbstractContextManager[None]:
    """Inside, the tensors of `put_expanded_zeros` are on the meta device again."""
    held = [attribute for attribute in tensor_attributes(module) if not attribute[2].is_meta]
    return _replaced(held, lambda value: torch.empty(value.shape, dtype=value.dtype, device="meta"))


@contextlib.contextmanager
def others_as_zeros(model: nn.Module, units: Iterable[str], device: torch.device) -> Iterator[None]:
    """Inside, code between units sees the parameters of other stages as zeros of the right dtype on `device`.

    For code whose results nothing that follows depends on (see Profile.read), and for the dtype and device of a module.
    """
    empty = [module for module in model.modules() if next(module.parameters(), None) is None]
    held = [attribute for unit in units for attribute in meta_tensors(model.get_submodule(unit))]
    with _replaced(held, lambda meta: expanded_zeros(meta, device)):
        for module in empty:
            module.__dict__[SHOWN] = partial(_named_parameters, module, True)
        try:
            yield
        finally:
            for module in empty:
                del module.__dict__[SHOWN]


def unit_tensors(module: nn.Module) -> list[Tensor]:
    """The tensors in the attributes of a module and its submodules."""
    return [tensor for *_, tensor in tensor_attributes(module)]


def parameters_of(module: nn.Module) -> list[Tensor]:
    """What a unit of a skeleton has in place of its parameters."""
    held = (part.__dict__.get(name) for part in module.modules() for name in part.__dict__.get(_NAMES, ()))
    return [tensor for tensor in held if isinstance(tensor, Tensor)]
