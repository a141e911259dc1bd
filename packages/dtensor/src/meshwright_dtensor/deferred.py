"""Deferred initialisation: build a model larger than memory with its own constructor, then keep only a rank's
boxes.

    with deferred_init():
        model = Model(config)                      # any code; values of one device, bit for bit
    shard = local_values(model.weight, box)        # only this box, in memory

Inside the context every large CPU tensor lives in a memory-mapped file on a disk. The code that fills it runs
as ever, in the same order, with the same numbers; the kernel keeps as many of the pages as it has room for.
Nothing is recorded or replayed, so nothing can come out different. The price is disk space for the model,
once per rank, and about 1.6 times the time.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from meshwright_dtensor._mapped_files import MappedFiles, choose_directory, is_mapped
from meshwright_dtensor._torch import (
    TorchDispatchMode,
    fake_mode_active,
    op_arguments,
    op_mutates,
    op_name,
    op_returns_fresh_tensor,
    out_overload,
    pytree,
)
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.regions import Place, copy_of

MIN_BYTES = 1 << 16

# Makers whose result is whatever the memory holds, or zeros: a new file is zeros already.
_EMPTY = frozenset(
    f"aten::{name}"
    for name in ("empty", "empty_strided", "empty_permuted", "empty_like", "new_empty", "new_empty_strided")
    + ("zeros", "zeros_like", "new_zeros")
)
# Makers that are defined by an op in place on an empty tensor: the same numbers, drawn straight into the file.
_FILLED: Mapping[str, str] = {
    "aten::ones": "one",
    "aten::ones_like": "one",
    "aten::new_ones": "one",
    "aten::full": "fill",
    "aten::full_like": "fill",
    "aten::new_full": "fill",
    "aten::rand": "uniform",
    "aten::rand_like": "uniform",
    "aten::randn": "normal",
    "aten::randn_like": "normal",
    "aten::clone": "copy",
    "aten::_to_copy": "copy",
}
# Makers without tensors that have a version for a given output.
_WITH_OUT = frozenset(
    f"aten::{name}" for name in ("arange", "linspace", "eye", "randint", "randperm", "normal", "tril_indices")
)


@contextmanager
def deferred_init(
    *, directory: str | os.PathLike[str] | None = None, min_bytes: int = MIN_BYTES
) -> Iterator[None]:
    """Inside, CPU tensors of at least `min_bytes` are made in files of `directory`; values are those of one
    device.

    `directory` is by default MESHWRIGHT_INIT_DIR, else the temporary directory, /var/tmp or the current one,
    whichever has the most room; it is never a file system in memory. A file is freed with its tensor and never has a
    name that outlives its making. Parameters made here are ordinary; used as they are, they go on living in
    their files, which a forked process shares; their storage cannot grow (`resize_` raises). Raises
    UsageError if there is no disk, MeshwrightError when the disk is full.
    """
    if min_bytes < 1:
        raise UsageError(f"min_bytes={min_bytes} is not positive; the default is {MIN_BYTES}")
    with _MappedInit(MappedFiles(choose_directory(directory)), min_bytes):
        yield


def is_deferred(value: torch.Tensor | nn.Module) -> bool:
    """Whether a tensor, or any parameter or buffer of a module, lives in a file of `deferred_init`."""
    if isinstance(value, nn.Module):
        return any(is_mapped(tensor) for tensor in (*value.parameters(), *value.buffers()))
    return is_mapped(value)


def local_values(tensor: torch.Tensor, box: Place) -> torch.Tensor:
    """A copy of the `box` (or region) of `tensor` in ordinary memory, without holes, the dims in the same memory order,
    detached.

    Works for any tensor. The rest of a deferred tensor is never read into ordinary memory.
    """
    return copy_of(tensor.detach(), box)


class _MappedInit(TorchDispatchMode):
    """Sees every op below autograd and moves large results into files: made there where possible, else copied
    there.
    """

    def __init__(self, files: MappedFiles, min_bytes: int) -> None:
        super().__init__()
        self._files = files
        self._min_bytes = min_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if fake_mode_active():  # fake tensors take no memory
            return func(*args, **kwargs)
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if op_mutates(func) or not all(_is_plain(tensor) for tensor in inputs):
            return func(*args, **kwargs)
        result = self._made_in_file(func, args, kwargs, inputs)
        if result is not None:
            return result
        result = func(*args, **kwargs)
        known = set() if op_name(func) == "aten::lift_fresh" else {_storage(tensor) for tensor in inputs}
        return pytree.tree_map_only(torch.Tensor, lambda tensor: self._moved(tensor, known), result)

    def _made_in_file(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], inputs: list[torch.Tensor]
    ) -> torch.Tensor | None:
        """The result of `func`, computed straight into a file; None if it is small or `func` is not one to do
        so.
        """
        name = op_name(func)
        pointwise = torch.Tag.pointwise in func.tags
        if not (name in _EMPTY or name in _FILLED or name in _WITH_OUT or pointwise):
            return None
        if not op_returns_fresh_tensor(func):
            return None
        if pointwise and not any(self._is_large(tensor) for tensor in inputs):
            return None
        device = kwargs.get("device")
        if (device is not None and torch.device(device).type != "cpu") or kwargs.get("pin_memory"):
            return None
        sketch = _sketch(func, args, kwargs)
        if sketch is None or not self._is_large(sketch):
            return None
        if name in _EMPTY:
            return self._new(sketch)
        if name in _FILLED:
            given = {**dict(zip(op_arguments(func), args, strict=False)), **kwargs}
            return _fill(_FILLED[name], self._new(sketch), given)
        out = out_overload(func)
        if out is None:
            return None
        accepted = op_arguments(out)
        named = {key: value for key, value in kwargs.items() if key in accepted}
        target = next(reversed(accepted))
        return out(*args, **named, **{target: self._new(sketch)})

    def _moved(self, tensor: torch.Tensor, known: set[int]) -> torch.Tensor:
        """`tensor`, or its copy in a file if it is large, new and in ordinary memory."""
        if not _is_plain(tensor) or tensor.device.type != "cpu" or not self._is_large(tensor):
            return tensor
        if _storage(tensor) in known or is_mapped(tensor) or tensor.is_conj() or tensor.is_neg():
            return tensor
        if tensor.untyped_storage().nbytes() < math.prod(tensor.shape) * tensor.dtype.itemsize:
            return tensor  # a small one, expanded
        return self._new(tensor).copy_(tensor)

    def _new(self, like: torch.Tensor) -> torch.Tensor:
        return self._files.zeros(like.shape, like.stride(), like.dtype)

    def _is_large(self, tensor: torch.Tensor) -> bool:
        return math.prod(tensor.shape) * tensor.dtype.itemsize >= self._min_bytes


def _is_plain(tensor: torch.Tensor) -> bool:
    """An ordinary dense tensor; subclasses (fake, distributed, quantised ones) keep their own ways."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter, nn.Buffer)
    return plain and tensor.layout == torch.strided and not tensor.is_quantized


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _sketch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The result on the meta device: its shape, strides and dtype; None if torch cannot say or it is on a
    device.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return None
    leaves = [_as_meta(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
    meta_args, meta_kwargs = pytree.tree_unflatten(leaves, spec)
    if "device" in op_arguments(func):
        meta_kwargs = {**meta_kwargs, "device": torch.device("meta")}
    if "generator" in meta_kwargs:
        meta_kwargs = {**meta_kwargs, "generator": None}
    try:
        result = func(*meta_args, **meta_kwargs)
    except (
        NotImplementedError,
        RuntimeError,
    ):  # no meta kernel, or a user's error that the real call shall report
        return None
    return result


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _fill(how: str, target: torch.Tensor, given: Mapping[str, Any]) -> torch.Tensor:
    generator = given.get("generator")
    if how == "one":
        return target.fill_(1)
    if how == "fill":
        return target.fill_(given["fill_value"])
    if how == "uniform":
        return target.uniform_(0, 1, generator=generator)
    if how == "normal":
        return target.normal_(0, 1, generator=generator)
    return target.copy_(given["self"])
