"""A call as text, by which the ranks of a host notice that they build different models."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from meshwright_dtensor._torch import core
from meshwright_dtensor.deferred import mapped_files
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.utils.checksum import checksum

_WHOLE = 1 << 16
"""Bytes of a tensor of which every bit is compared; of larger ones, as many elements as `parallelize` compares."""
_SAMPLES = 64


Holds = Callable[[torch.Tensor], bool]
"""Whether a tensor is in a file that the ranks share."""


def call_text(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], holds: Holds) -> str:
    """The call with shapes, numbers and checksums of the values that each rank has of its own; and the states of generators.

    Equal texts mean equal results, apart from large tensors that differ between the compared elements.
    """
    named = [f"{key}={_text(value, holds)}" for key, value in sorted(kwargs.items()) if key != "generator"]
    text = f"{core.op_name(func)}({', '.join([*(_text(value, holds) for value in args), *named])})"
    if core.op_draws(func) or generators_of(args, kwargs)[1:]:
        states = [zlib.crc32(bytes(state_of(generator))) for generator in generators_of(args, kwargs)]
        text += f" from the random state {' '.join(f'{state:08x}' for state in states)}"
    return text


def tensor_text(tensor: torch.Tensor, holds: Holds) -> str:
    """Dtype, shape and strides, and a checksum of values that are this rank's own."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    if not mapped_files.is_plain(tensor):
        return f"{type(tensor).__name__} {dtype} {list(tensor.shape)}"
    text = f"{dtype} {list(tensor.shape)}"
    if not tensor.is_contiguous():
        text += f" of strides {list(tensor.stride())}"
    if not on_host(tensor.device):
        return f"{text} on {tensor.device.type}"
    if holds(tensor):
        return f"{text} at {tensor.storage_offset()}" if tensor.storage_offset() else text
    sampled = _SAMPLES if tensor.nbytes > _WHOLE else None
    return f"{text} with the checksum {checksum(tensor, samples=sampled):x}"


def generators_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Generator]:
    """The default generator of the CPU, and the generators of the CPU among the arguments."""
    given = [leaf for leaf in core.pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
    return [torch.default_generator, *(generator for generator in given if on_host(generator.device))]


def state_of(generator: torch.Generator) -> bytes:
    """The state of a generator, as bytes."""
    return generator.get_state().numpy().tobytes()


def _text(value: Any, holds: Holds) -> str:
    if isinstance(value, torch.Tensor):
        return tensor_text(value, holds)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_text(part, holds) for part in value)}]"
    if isinstance(
        value, (bool, int, float, complex, str, torch.dtype, torch.device, torch.memory_format, torch.layout)
    ):
        return str(value)
    return "None" if value is None else type(value).__name__
