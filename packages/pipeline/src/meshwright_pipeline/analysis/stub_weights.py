"""Numbers for a look at modules without their weights: stand-ins that take little memory, and no randomness.

A large stand-in is a view in which elements repeat; a product with one, or a convolution of many channels, is made of as many
of its elements as it takes for every input to reach an output, so that a block of any size costs what its activations cost.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch

from meshwright_pipeline._torch import TorchDispatchMode, arguments_of, draws, op_name
from meshwright_pipeline.analysis.module_state import LARGE
from meshwright_pipeline.pytrees import tensors_of

Tensor = torch.Tensor

MOST = 1 << 26
"""Elements of a large stand-in that an operation other than a product may read."""

CHANNELS = 1 << 10
"""Pairs of channels of a convolution from which not each is multiplied."""

_STRIDES = (1, 7, 17, 29, 41, 53)
_PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "linear": (0, 1)}
_EMPTY = frozenset("empty new_empty empty_like empty_strided new_empty_strided".split())


class TooLarge(Exception):
    """A stand-in would have to be made in full."""


def stub_tensor(shape: torch.Size, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """What takes the place of a weight or a buffer: fractions at random, of a size that keeps activations alike; choices; zeros."""
    if dtype == torch.bool:
        return torch.rand(shape, generator=generator) < 0.5
    if not (dtype.is_floating_point or dtype.is_complex):
        return torch.zeros(shape, dtype=dtype)
    if len(shape) < 2:
        return (0.5 + torch.rand(shape, generator=generator)).to(dtype)
    scale = 1 / math.sqrt(max(1, math.prod(shape[1:])))
    if math.prod(shape) <= LARGE or len(shape) > len(_STRIDES):
        return (torch.randn(shape, generator=generator) * scale).to(dtype)
    strides = _STRIDES[: len(shape)][::-1]
    held = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return (torch.randn(held, generator=generator) * scale).to(dtype).as_strided(shape, strides)


class StubMode(TorchDispatchMode):
    """Inside, what is drawn at random is the same for every row.

    Args:
        large: large stand-ins.
    """

    def __init__(self, large: Collection[Tensor] = ()) -> None:
        super().__init__()
        self._large = {tensor.untyped_storage().data_ptr() for tensor in large}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op_name(func)
        if draws(func, args, kwargs):
            return _drawn(func, name, args, kwargs)
        if name == "convolution" and _is_wide(args):
            return _convolution(func, *args)
        if self._large and not func.is_view:
            read = [t.numel() for t in tensors_of((args, kwargs)) if self._is_large(t)]
            if read and name in _PRODUCTS and self._is_large(args[_PRODUCTS[name][1]]):
                return _product(name, args, kwargs)
            if max(read, default=0) > MOST:
                raise TooLarge(f"{name} reads a weight of {max(read)} elements")
        result = func(*args, **kwargs)
        if name in _EMPTY:
            result.zero_()
        return result

    def _is_large(self, tensor: Any) -> bool:
        return (
            isinstance(tensor, Tensor)
            and not tensor.is_meta
            and tensor.untyped_storage().data_ptr() in self._large
        )


def _drawn(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """What a random operation gives where all that it draws is alike."""
    if name == "native_dropout":
        return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
    if "dropout_p" in arguments_of(func):
        place = arguments_of(func).index("dropout_p")
        if place < len(args):
            return func(*args[:place], 0.0, *args[place + 1 :], **kwargs)
        return func(*args, **{**kwargs, "dropout_p": 0.0})
    if "generator" in kwargs:  # one of its own stays as it is
        kwargs = {**kwargs, "generator": None}
    result = func(*args, **kwargs)
    for tensor in tensors_of(result):
        if name.startswith("randperm"):
            tensor.copy_(torch.arange(tensor.numel(), device=tensor.device))
        else:
            tensor.fill_(0.5 if tensor.is_floating_point() else tensor.dtype == torch.bool)
    return result


def _product(name: str, args: Any, kwargs: Any) -> Tensor:
    """A product with a large stand-in: every input and every output takes part at least once."""
    first, second = _PRODUCTS[name]
    given: Tensor = args[first]
    weight: Tensor = args[second].t() if name == "linear" else args[second]
    inner, outer = weight.shape
    every = torch.arange(max(inner, outer), device=given.device)
    own = weight[every % inner, every % outer] * math.sqrt(inner * outer / len(every))
    made = given.new_zeros((*given.shape[:-1], outer))
    made.index_add_(-1, every % outer, given[..., every % inner] * own)
    if name == "addmm":
        return made * kwargs.get("alpha", 1) + args[0] * kwargs.get("beta", 1)
    bias = args[2] if len(args) > 2 else kwargs.get("bias")
    return made if bias is None else made + bias


def _is_wide(args: Any) -> bool:
    """Whether a convolution joins so many channels that it would take much longer than anything else."""
    outer, inner = args[1].shape[:2]
    return args[8] == 1 and outer * inner > CHANNELS


def _convolution(
    func: Any,
    given: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    more: Any,
    groups: int,
) -> Tensor:
    """A convolution in which every input channel reaches an output channel, and every output channel has one."""
    inner, outer = weight.shape[:2] if transposed else reversed(weight.shape[:2])
    every = torch.arange(max(inner, outer), device=given.device)
    into, out = every % inner, every % outer
    own = (weight[into, out] if transposed else weight[out, into]) * math.sqrt(inner * outer / len(every))
    made = func(
        given[:, into], own.unsqueeze(1), None, stride, padding, dilation, transposed, more, len(every)
    )
    summed = made.new_zeros((made.shape[0], outer, *made.shape[2:])).index_add_(1, out, made)
    return summed if bias is None else summed + bias.view(-1, *[1] * (made.dim() - 2))
