"""The local shards of a tensor: boxes of the global value and their boxes in the local tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_checkpoint._torch import indices_of, is_sharding, local_of
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding import boxes
from meshwright_dtensor.sharding.boxes import Box, Region
from meshwright_dtensor.sharding.intervals import Interval
from meshwright_dtensor.stored.permuted import dequantized, permuted_layout


@dataclass(frozen=True)
class LocalShards:
    """This rank's shards of one tensor.

    shape, dtype: of the global value.
    local: the local tensor; shares memory.
    boxes: (box of the global value, its box in `local`), none empty.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    local: torch.Tensor
    boxes: tuple[tuple[Box, Box], ...]

    def view(self, box: Box) -> torch.Tensor:
        """The part of the local tensor that holds the global `box`, which must be inside one shard."""
        there, here = next(pair for pair in self.boxes if boxes.intersect(box, pair[0]) == box)
        inside = boxes.relative_to(box, there)
        local_box = tuple((mine + at, n) for (at, n), (mine, _) in zip(inside, here, strict=True))
        return boxes.slice_of(self.local, local_box)


def local_shards(tensor: torch.Tensor, name: str, parameter: torch.Tensor | None = None) -> LocalShards:
    """The shards that this rank holds of a plain tensor (all of it) or any DTensor; those of quantized states are a copy.

    Args:
        name: for messages.
        parameter: the parameter of an optimizer state. Its permuted layout applies to states of the same shape.

    Raises:
        UsageError: the tensor is on the meta device.
        UnsupportedError: the tensor holds partial sums or is not dense.
    """
    if not isinstance(tensor, DTensor) and hasattr(tensor, "full_tensor"):
        # a global tensor
        tensor = tensor.full_tensor()
    local: Any = local_of(tensor)
    # blocks end elsewhere in another layout
    local = dequantized(local)
    if local.is_meta:
        text = f"{name} is on the meta device and has no values; allocate it first (parallelize, or to_empty)"
        raise UsageError(text)
    if local.layout != torch.strided or local.is_quantized:
        raise UnsupportedError(f"{name} is not a dense tensor (layout {local.layout}); convert it first")
    pairs: list[tuple[Box, Box]] = [((), ())]
    if tensor.dim():
        pairs = boxes.region_boxes(_region(tensor, name, parameter))
    elif isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is None:
        pairs = []
    nonempty = tuple((there, here) for there, here in pairs if boxes.box_numel(there))
    if sum(boxes.box_numel(there) for there, _ in nonempty) != local.numel():
        text = f"{name}: the local tensor has shape {tuple(local.shape)}, which does not match its placements ({pairs})"
        raise UnsupportedError(text)
    return LocalShards(tuple(tensor.shape), tensor.dtype, local, nonempty)


def _region(tensor: torch.Tensor, name: str, parameter: torch.Tensor | None) -> Region:
    if not isinstance(tensor, DTensor):
        return tuple(((0, size),) for size in tensor.shape)
    if any(p.is_partial() for p in tensor.placements):
        text = f"{name} holds partial sums ({tensor.placements}); redistribute it to Replicate or Shard first"
        raise UnsupportedError(text)
    if isinstance(tensor, MeshParameter):
        return tensor.global_layout.region
    layout = permuted_layout(tensor)
    if layout is None and parameter is not None and parameter.shape == tensor.shape:
        layout = permuted_layout(parameter)
    if layout is not None:
        return layout.region
    for placement in tensor.placements:
        if not (placement.is_replicate() or is_sharding(placement)):
            raise UnsupportedError(
                f"{name} has placement {placement}, which checkpoints do not support; use Shard or Replicate"
            )
    coordinate = tensor.device_mesh.get_coordinate()
    # this rank is not in the mesh
    if coordinate is None:
        return tuple(((0, 0),) for _ in tensor.shape)
    axes = tuple(zip(tensor.placements, tensor.device_mesh.shape, coordinate, strict=True))
    return _stock_region(axes, tuple(map(type, tensor.placements)), tuple(tensor.shape))


@lru_cache(maxsize=1024)
def _stock_region(axes: tuple[Any, ...], kinds: tuple[type, ...], shape: tuple[int, ...]) -> Region:
    """The region of a stock DTensor on a rank; `axes` as for `indices_of`. `kinds` is in the key: _StridedShard == Shard."""
    return tuple(_intervals(indices_of(axes, shape, dim)) for dim in range(len(shape)))


def _intervals(indices: torch.Tensor) -> tuple[Interval, ...]:
    """The intervals of consecutive indices."""
    if not indices.numel():
        return ((0, 0),)
    breaks = (indices[1:] - indices[:-1] != 1).nonzero().flatten() + 1
    pieces = indices.tensor_split(breaks.tolist())
    return tuple((int(piece[0]), piece.numel()) for piece in pieces)


def box_nbytes(box: Box, dtype: torch.dtype) -> int:
    """Size of a box in bytes."""
    return boxes.box_numel(box) * dtype.itemsize


def box_text(box: Box) -> str:
    """As "[0:4, 8:16]"."""
    return "[" + ", ".join(f"{start}:{start + length}" for start, length in box) + "]"
