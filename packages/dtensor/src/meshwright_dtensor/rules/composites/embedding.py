"""torch.nn.functional.embedding and embedding_bag (bags of one size), also with a sharded vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, finish
from meshwright_dtensor.sharding.states import P, R


@dataclass(frozen=True)
class Part:
    """This rank's part of a vocabulary of `size`: `length` ids from `start` on."""

    start: int
    length: int
    size: int

    def elsewhere(self, ids: torch.Tensor) -> torch.Tensor:
        """Mask of the ids on other ranks. Ids outside of the whole vocabulary are on no rank, and raise."""
        outside = (ids < self.start) | (ids >= self.start + self.length)
        return outside & (ids >= 0) & (ids < self.size)


class Lookup(Composite):
    """A lookup of ids, the first input, in a weight [v, h], the second."""

    def permutes(self, view: NodeView, row: Strategy) -> bool:
        """Not for a sharded vocabulary: an id is looked up by the offset of one chunk."""
        return row.ins[1] != 0

    def plain(self, ctx: LocalContext) -> bool:
        """Unless the vocabulary is sharded."""
        return not ctx.axes_sharding(1, 0)

    def part(self, ctx: LocalContext) -> Part:
        """This rank's part of the vocabulary."""
        return Part(*ctx.box(ctx.in_shapes[1], ctx.ins[1])[0], ctx.in_shapes[1][0])


class Embedding(Lookup):
    """ids [...], weight [v, h] -> [..., h].  Ids of other ranks give zero, so a sharded vocabulary gives a partial sum."""

    name: ClassVar[str] = "embedding"
    functions: ClassVar[tuple[Any, ...]] = (F.embedding,)

    @from_call
    def normalise(
        self,
        input: Any,
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Bound | None:
        """(ids, weight, padding_idx >= 0 or None); calls that renorm, scale or return sparse gradients are not handled."""
        if max_norm is not None or scale_grad_by_freq or sparse or weight.dim() != 2:
            return None
        if padding_idx is not None:
            if not -weight.shape[0] <= padding_idx < weight.shape[0]:
                # F.embedding raises
                return None
            padding_idx %= weight.shape[0]
        return (input, weight, padding_idx), {}

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Dims of ids; features; vocabulary (partial); a partial weight."""
        ndim = len(view.in_shapes[0])
        rows: list[Row] = [((dim, R), (dim,)) for dim in range(ndim)]
        rows += [((R, 1), (ndim,)), ((R, 0), (P,)), ((R, P), (P,))]
        return finish(view, rows, "hand")

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Lookup of the ids in this rank's part of the vocabulary; an id outside the whole vocabulary raises."""
        padding = ctx.node.args[2]
        if self.plain(ctx):
            return lambda tensors: F.embedding(tensors[0], tensors[1], padding)
        part = self.part(ctx)
        held = padding is not None and part.start <= padding < part.start + part.length
        local_padding = padding - part.start if held else None

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, weight = tensors
            elsewhere = part.elsewhere(ids)
            rows = F.embedding((ids - part.start).masked_fill(elsewhere, 0), weight, local_padding)
            return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

        return run


class EmbeddingBag(Lookup):
    """ids [n, l], weight [v, h] -> [n, h], the sum, mean or maximum of each row's l embeddings.

    As for embeddings, ids of other ranks give zero, so a sharded vocabulary gives a partial sum; a maximum needs all of it.
    """

    name: ClassVar[str] = "embedding_bag"
    functions: ClassVar[tuple[Any, ...]] = (F.embedding_bag,)

    @from_call
    def normalise(
        self,
        input: Any,
        weight: Any,
        offsets: Any = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: str = "mean",
        sparse: bool = False,
        per_sample_weights: Any = None,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
    ) -> Bound | None:
        """(ids, weight, mode); bags with offsets, weights or padding, and what Embedding leaves, are not handled."""
        if mode not in ("sum", "mean", "max") or input.dim() != 2 or weight.dim() != 2 or not input.numel():
            return None
        if max_norm is not None or scale_grad_by_freq or sparse or padding_idx is not None:
            return None
        if offsets is not None or per_sample_weights is not None or include_last_offset:
            return None
        return (input, weight, mode), {}

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Bags; features; vocabulary (partial); a partial weight."""
        rows: list[Row] = [((0, R), (0,)), ((R, 1), (1,))]
        if view.node.args[2] != "max":
            rows += [((R, 0), (P,)), ((R, P), (P,))]
        return finish(view, rows, "hand")

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Bags of the ids in this rank's part of the vocabulary; an id outside the whole vocabulary raises."""
        mode = ctx.node.args[2]
        if self.plain(ctx):
            return lambda tensors: F.embedding_bag(tensors[0], tensors[1], mode=mode)
        part = self.part(ctx)

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, weight = tensors
            elsewhere = part.elsewhere(ids)
            counted = (~elsewhere).to(weight.dtype)
            local_ids = (ids - part.start).masked_fill(elsewhere, 0)
            total = F.embedding_bag(local_ids, weight, mode="sum", per_sample_weights=counted)
            return total if mode == "sum" else total / ids.shape[1]

        return run
