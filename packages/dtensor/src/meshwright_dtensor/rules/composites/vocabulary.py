"""What lookups in a table have in common whose vocabulary may be spread over ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshwright_dtensor.rules.base import NodeView, Strategy
from meshwright_dtensor.rules.composite import Composite, LocalContext


@dataclass(frozen=True)
class Part:
    """This rank's part of a vocabulary of `size`: `length` ids from `start` on."""

    start: int
    length: int
    size: int

    def elsewhere(self, ids: torch.Tensor) -> torch.Tensor:
        """Where ids lie on other ranks; those outside of the whole vocabulary are nobody's, and raise as ever."""
        outside = (ids < self.start) | (ids >= self.start + self.length)
        return outside & (ids >= 0) & (ids < self.size)


class Lookup(Composite):
    """A lookup of ids, the first input, in a weight [v, h], the second."""

    def permutes(self, view: NodeView, row: Strategy) -> bool:
        """But for the vocabulary: an id is looked up by the offset of one chunk."""
        return row.ins[1] != 0

    def plain(self, ctx: LocalContext) -> bool:
        """Unless the vocabulary is sharded."""
        return not ctx.axes_sharding(1, 0)

    def part(self, ctx: LocalContext) -> Part:
        """This rank's part of the vocabulary."""
        start, length = ctx.box(ctx.in_shapes[1], ctx.ins[1])[0]
        return Part(start, length, ctx.in_shapes[1][0])
