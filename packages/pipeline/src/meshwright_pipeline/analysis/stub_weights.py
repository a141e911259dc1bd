"""Stub weights for the row-mixing trial: small, deterministic values in place of a module's parameters.

A large stub is a view with repeated elements. A product with it, or a convolution with many channels, uses only as many
elements as are needed for every input to reach an output. So a block of any size costs what its activations cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_pipeline._torch import TorchDispatchMode, draws, named_arguments, op_name, tensors_in
from meshwright_pipeline.module_state import LARGE
from meshwright_pipeline.pytrees import tensors_of
from meshwright_pipeline.trace.meta_model import meta_tensors

Tensor = torch.Tensor

MOST = 1 << 26
"""Most elements of a large stub that an operation other than a product may read."""

CHANNELS = 1 << 10
"""Convolutions with more channel pairs than this are reduced."""

HALVED = (torch.float16, torch.bfloat16)
_STRIDES = (1, 7, 17, 29, 41, 53)
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "linear": (0, 1)}
_EMPTY = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())


class TooLarge(Exception):
    """A large stub would have to be read in full."""


def stub_tensor(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """A stub for a weight or buffer: random fractions scaled to keep activations bounded, random booleans, or integer zeros."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator, device=HOST) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype, device=HOST)
    if len(shape) < 2:
        return (0.5 + torch.rand(shape, generator=generator, device=HOST)).to(dtype)
    scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    if math.prod(shape) <= LARGE or len(shape) > len(_STRIDES):
        return (torch.randn(shape, generator=generator, device=HOST) * scale).to(dtype)
    strides = _STRIDES[: len(shape)][::-1]
    length = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (
        (torch.randn(length, generator=generator, device=HOST) * scale).to(dtype).as_strided(shape, strides)
    )


class StubMode(TorchDispatchMode):
    """Inside, random operations give the same values for every row, and products read only a part of the `large` stubs."""

    def __init__(self, large: Collection[Tensor] = ()) -> None:
        super().__init__()
        self._large = {tensor.untyped_storage().data_ptr() for tensor in large}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if draws(func, args, kwargs):
            return _constant_draw(func, name, args, kwargs)
        # a convolution with so many channel pairs that it would dominate the trial
        if name == "convolution" and args[8] == 1 and math.prod(args[1].shape[:2]) > CHANNELS:
            return _convolution(func, *args)
        if self._large and not func.is_view:
            sizes = [t.numel() for t in tensors_of((args, kwargs)) if self._is_large(t)]
            if sizes and name in _PRODUCTS and self._is_large(args[_PRODUCTS[name][1]]):
                return _product(name, args, kwargs)
            if max(sizes, default=0) > MOST:
                raise TooLarge(f"{name} reads a weight of {max(sizes)} elements")
        result = func(*args, **kwargs)
        if name in _EMPTY:
            result.zero_()
        return result

    def _is_large(self, tensor: Any) -> bool:
        has_memory = isinstance(tensor, Tensor) and not tensor.is_meta
        return has_memory and tensor.untyped_storage().data_ptr() in self._large


def _constant_draw(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """The result of a random operation if all its random numbers are equal."""
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    arguments = named_arguments(func, args, kwargs)
    if "dropout_p" in arguments:
        return func(**{**arguments, "dropout_p": 0.0})
    # leave the state of a generator argument unchanged
    if "generator" in kwargs:
        kwargs = {**kwargs, "generator": None}
    result = func(*args, **kwargs)
    for tensor in tensors_of(result):
        if name.startswith("randperm"):
            tensor.copy_(torch.arange(tensor.numel(), device=tensor.device))
        else:
            tensor.fill_(0.5 if tensor.is_floating_point() else tensor.dtype == torch.bool)
    return result


def _product(name: str, args: Any, kwargs: Any) -> Tensor:
    """A product with a large stub, in which every input and every output takes part at least once."""
    first, second = _PRODUCTS[name]
    value: Tensor = args[first]
    weight: Tensor = args[second].t() if name == "linear" else args[second]
    inner, outer = weight.shape
    pairs = torch.arange(max(inner, outer), device=value.device)
    factors = weight[pairs % inner, pairs % outer] * math.sqrt(inner * outer / len(pairs))
    result = value.new_zeros((*value.shape[:-1], outer))
    result.index_add_(-1, pairs % outer, value[..., pairs % inner] * factors)
    if name == "addmm":
        return result * kwargs.get("alpha", 1) + args[0] * kwargs.get("beta", 1)
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return result if bias is None else result + bias


def _convolution(func: Any, value: Tensor, weight: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution in which every input channel and every output channel takes part at least once."""
    *options_but_groups, _ = options
    transposed = options[3]
    inner, outer = weight.shape[:2] if transposed else reversed(weight.shape[:2])
    count = max(inner, outer)
    pairs = torch.arange(count, device=value.device)
    into, out = pairs % inner, pairs % outer
    kernels = (weight[into, out] if transposed else weight[out, into]) * math.sqrt(inner * outer / count)
    parts = func(value[:, into], kernels.unsqueeze(1), None, *options_but_groups, count)
    summed = parts.new_zeros((parts.shape[0], outer, *parts.shape[2:])).index_add_(1, out, parts)
    return summed if bias is None else summed + bias.view(-1, *[1] * (parts.dim() - 2))


def with_stubs(model: nn.Module, units: Sequence[str]) -> tuple[nn.Module, list[Tensor]]:
    """The skeleton in full precision, with stubs for parameters outside of units; and its large tensors."""
    generator, large = torch.Generator().manual_seed(0), list[Tensor]()
    for part in model.modules():
        parameters, buffers = tensors_in(part)
        for name, tensor in list(parameters.items()):
            if tensor is not None and tensor.is_floating_point():
                stub = stub_tensor(tensor.shape, _full_precision(tensor.dtype), generator)
                parameters[name] = nn.Parameter(stub, requires_grad=False)
                large += [parameters[name]] if stub.numel() > LARGE else []
        for name, tensor in list(buffers.items()):
            if tensor is not None and tensor.is_floating_point():
                buffers[name] = tensor.to(_full_precision(tensor.dtype))
    for unit in units:
        for part, name, tensor in meta_tensors(model.get_submodule(unit)):
            part.__dict__[name] = tensor.to(_full_precision(tensor.dtype))
    return model, large


def _full_precision(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in HALVED else dtype
