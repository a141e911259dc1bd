"""Geometry of a parameter that is sharded along one dim into the rows of a flat buffer, one row per rank.

    whole [.., L, ..]  <->  rows [n, size]      size = elements of the largest shard

Copies follow the parameter's own memory order, so a transposed parameter is copied as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch

from meshwright_dtensor.devices import on_host
from meshwright_dtensor.sharding.boxes import Interval, dense_strides
from meshwright_parallel.strategies.data import BUCKET_BYTES, SINGLE_BYTES, SUMMED_ALONE_BYTES


def single_bytes(device: torch.device, sharded: bool = True) -> int:
    """Size from which a tensor has a collective of its own, without copies, which are cheap on accelerators.

    `sharded`: it is gathered or reduce-scattered; otherwise all-reduced.
    """
    if not on_host(device):
        return BUCKET_BYTES
    return SINGLE_BYTES if sharded else SUMMED_ALONE_BYTES


@dataclass(frozen=True)
class Shards:
    """How a tensor of local shape `shape` (whole on the axis) is sharded along `dim` over the ranks of an axis.

    Attributes:
        spans: per rank the part of the dim that it has: (first, length).
        rank: this rank's coordinate on the axis.
        order: dims from the outermost in memory to the innermost.
    """

    shape: tuple[int, ...]
    dim: int
    spans: tuple[Interval, ...]
    rank: int
    order: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of ranks."""
        return len(self.spans)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the whole: dense, in the parameter's memory order."""
        return dense_strides(self.shape, self.order)

    @cached_property
    def chunk(self) -> int:
        """Length of the sharded dim in the largest shard."""
        return max(length for _, length in self.spans)

    @property
    def size(self) -> int:
        """Elements of a row: those of the largest shard."""
        return math.prod(self.shape) // self.shape[self.dim] * self.chunk

    @cached_property
    def even(self) -> bool:
        """Whether all shards are equal, in the order of the ranks."""
        return all(span == (rank * self.chunk, self.chunk) for rank, span in enumerate(self.spans))

    @property
    def in_rows(self) -> bool:
        """Whether the memory of the whole is that of the ranks' shards, one after the other."""
        return self.even and self.order[0] == self.dim

    def shard_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of a rank's shard."""
        return (*self.shape[: self.dim], self.spans[rank][1], *self.shape[self.dim + 1 :])

    def part(self, whole: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The view of `whole` that is the shard of a rank (this one by default)."""
        return whole.narrow(self.dim, *self.spans[self.rank if rank is None else rank])

    def in_row(self, row: torch.Tensor, rank: int | None = None) -> torch.Tensor:
        """The view of the first elements of a 1-D `row` that is the shard of a rank (this one by default)."""
        shape = self.shard_shape(self.rank if rank is None else rank)
        return row.as_strided(shape, dense_strides(shape, self.order), row.storage_offset())

    def pairs(self, rows: torch.Tensor, whole: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views (of `rows` [n, size], of `whole`) of the same elements, for copies between them."""
        if not self.even:
            return [(self.in_row(rows[r], r), self.part(whole, r)) for r in range(self.count)]
        shape = self.shard_shape(0)
        strides = (rows.stride(0), *dense_strides(shape, self.order))
        cut = rows.as_strided((self.count, *shape), strides, rows.storage_offset())
        parts = whole.unflatten(self.dim, (self.count, self.chunk)).movedim(self.dim, 0)
        return [(cut, parts)]
