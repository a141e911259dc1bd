"""All private torch names that this package uses. Check this module when torch changes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright_dtensor.devices import HOST


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor, or the tensor itself, without autograd; shares memory."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return local.detach()


def bytes_of_tensor(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous host tensor. The view keeps the tensor alive.

    numpy() is not used, because it makes the storage non-resizable for ever.
    """
    if not tensor.numel():
        return memoryview(bytearray())
    array: Any = (ctypes.c_ubyte * (tensor.numel() * tensor.element_size())).from_address(tensor.data_ptr())
    array.tensor = tensor
    return memoryview(array).cast("B")


def free_memory(tensor: torch.Tensor) -> None:
    """Free the memory of a tensor or of the local tensor of a DTensor, even if others refer to it."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    storage = local.untyped_storage()
    if storage.resizable():
        storage.resize_(0)
    else:
        # numpy() was called: the memory is freed with the last tensor that uses it
        local.data = local.new_empty(0)


def is_sharding(placement: Any) -> bool:
    """Whether a placement shards a dim, strided or not."""
    return isinstance(placement, (Shard, _StridedShard))


def indices_of(axes: Sequence[tuple[Any, int, int]], shape: Sequence[int], dim: int) -> torch.Tensor:
    """Indices of `dim` that a rank holds of a stock DTensor of global `shape`, in local order.

    Uses the placements' own split, so that strided shards (FSDP over tensor parallelism) are correct too.

    Args:
        axes: per mesh axis the placement, the size, and the rank's coordinate.
    """
    ndim = len(shape)
    held = torch.arange(shape[dim], device=HOST).view([-1 if d == dim else 1 for d in range(ndim)])
    for placement, size, here in axes:
        if is_sharding(placement) and placement.dim % ndim == dim:
            parts, _ = placement._split_tensor(held, size, with_padding=False, contiguous=True)
            held = parts[here]
    return held.flatten()


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's module, without the wrappers of DistributedDataParallel and torch.compile."""
    while True:
        if isinstance(model, nn.parallel.DistributedDataParallel):
            model = model.module
        elif hasattr(model, "_orig_mod"):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def plain_name(name: str) -> str:
    """A state dict name without the prefix of torch.compile."""
    return name.replace("_orig_mod.", "")


def is_extra_state(name: str) -> bool:
    """Whether an entry of a state dict is a module's own extra state."""
    return name.rpartition(".")[2] == nn.modules.module._EXTRA_STATE_KEY_SUFFIX


def storage_id(tensor: torch.Tensor) -> int:
    """Identifies the storage of a tensor while it lives."""
    return tensor.untyped_storage()._cdata
