"""torch.nn.functional.embedding_bag of bags of one size, also with a vocabulary that is spread over ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor.rules.base import NodeView, Row, Strategy, finish
from meshwright_dtensor.rules.composite import LocalContext, LocalFunction
from meshwright_dtensor.rules.composites.vocabulary import Lookup
from meshwright_dtensor.states import P, R


class EmbeddingBag(Lookup):
    """ids [n, l], weight [v, h] -> [n, h], the sum or mean of each row's l embeddings.

    As for embeddings, rows of other ranks give zero, so a sharded vocabulary gives a partial sum.
    """

    name: ClassVar[str] = "embedding_bag"
    functions: ClassVar[tuple[Any, ...]] = (F.embedding_bag,)

    def normalise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """(ids, weight, "sum" or "mean"); bags with offsets, weights or padding, and what Embedding leaves, are not handled."""

        def canonical(
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
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if mode not in ("sum", "mean") or input.dim() != 2 or weight.dim() != 2 or not input.numel():
                return None
            if max_norm is not None or scale_grad_by_freq or sparse or padding_idx is not None:
                return None
            if offsets is not None or per_sample_weights is not None or include_last_offset:
                return None
            return (input, weight, mode), {}

        return canonical(*args, **kwargs)

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Bags; features; vocabulary (partial); a partial weight."""
        rows: list[Row] = [((0, R), (0,)), ((R, 1), (1,)), ((R, 0), (P,)), ((R, P), (P,))]
        return finish(view, rows, "hand")

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Bags of the ids in this rank's part of the vocabulary; an id outside the whole vocabulary raises as ever."""
        mode = ctx.node.args[2]
        if self.plain(ctx):
            return lambda tensors: F.embedding_bag(tensors[0], tensors[1], mode=mode)
        part = self.part(ctx)

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, weight = tensors
            elsewhere = part.elsewhere(ids)
            counted = (~elsewhere).to(weight.dtype)
            own = (ids - part.start).masked_fill(elsewhere, 0)
            total = F.embedding_bag(own, weight, mode="sum", per_sample_weights=counted)
            return total if mode == "sum" else total / ids.shape[1]

        return run
