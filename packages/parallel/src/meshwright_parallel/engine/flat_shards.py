"""Geometry of parameters that are sharded along one dim into the rows of a flat buffer, one row per rank.

    whole [.., L, ..]  <->  rows [n, width]      a row has a rank's shards of several parameters, one after the other

So `width` is the most elements that a rank has of all of them, whatever parts of each it has. Copies follow the parameter's own
memory order, so a transposed parameter is copied as fast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
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

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements of each rank's shard."""
        return tuple(math.prod(self.shard_shape(rank)) for rank in range(self.count))

    @cached_property
    def even(self) -> bool:
        """Whether all shards are equal, in the order of the ranks."""
        return all(span == (rank * self.chunk, self.chunk) for rank, span in enumerate(self.spans))

    @cached_property
    def owner(self) -> int | None:
        """The rank that has the whole, where one has."""
        whole = (0, self.shape[self.dim])
        return self.spans.index(whole) if whole in self.spans and self.count > 1 else None

    def is_owned_alone(self, dtype: torch.dtype) -> bool:
        """Whether one rank has the whole, and it is so large that it is sent by itself, to or from that rank.

        In rows of equal width the others would send as many bytes.
        """
        # torch reduces no complex tensor to one rank
        large = math.prod(self.shape) * dtype.itemsize >= SINGLE_BYTES and not dtype.is_complex
        return large and self.owner is not None

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

    def pairs(
        self, rows: torch.Tensor, starts: Sequence[int], whole: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Pairs of views (of `rows` [n, width], of `whole`) of the same elements, for copies between them.

        `starts`: where the shard of each rank begins in its row.
        """
        if not self.even or len(set(starts)) > 1:
            ranks = (rank for rank in range(self.count) if self.sizes[rank])
            return [(self.in_row(rows[rank, starts[rank] :], rank), self.part(whole, rank)) for rank in ranks]
        shape = self.shard_shape(0)
        strides = (rows.stride(0), *dense_strides(shape, self.order))
        cut = rows.as_strided((self.count, *shape), strides, rows.storage_offset() + starts[0])
        parts = whole.unflatten(self.dim, (self.count, self.chunk)).movedim(self.dim, 0)
        return [(cut, parts)]


def row_starts(shards: Sequence[Shards]) -> tuple[list[tuple[int, ...]], int]:
    """Per item where the shard of each rank begins in its row, and the width of the rows.

    Equal shards are first, so that one copy moves those of all ranks.
    """
    starts: list[tuple[int, ...]] = [()] * len(shards)
    ends = [0] * (shards[0].count if shards else 0)
    for place in sorted(range(len(shards)), key=lambda place: not shards[place].even):
        starts[place] = tuple(ends)
        ends = [end + size for end, size in zip(ends, shards[place].sizes, strict=True)]
    return starts, max(ends, default=0)
