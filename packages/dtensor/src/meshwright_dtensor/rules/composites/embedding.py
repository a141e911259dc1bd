"""torch.nn.functional.embedding, also with a vocabulary that is spread over ranks."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor.rules.base import NodeView, Row, Strategy, finish
from meshwright_dtensor.rules.composite import LocalContext, LocalFunction
from meshwright_dtensor.rules.composites.vocabulary import Lookup
from meshwright_dtensor.states import P, R


class Embedding(Lookup):
    """ids [...], weight [v, h] -> [..., h].  Rows of other ranks give zero, so a sharded vocabulary gives a partial sum."""

    name: ClassVar[str] = "embedding"
    functions: ClassVar[tuple[Any, ...]] = (F.embedding,)

    def normalise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """(ids, weight, padding_idx >= 0 or None); calls that renorm, scale or return sparse gradients are not handled."""

        def canonical(
            input: Any,
            weight: Any,
            padding_idx: int | None = None,
            max_norm: float | None = None,
            norm_type: float = 2.0,
            scale_grad_by_freq: bool = False,
            sparse: bool = False,
        ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
            if max_norm is not None or scale_grad_by_freq or sparse or weight.dim() != 2:
                return None
            if padding_idx is not None:
                if not -weight.shape[0] <= padding_idx < weight.shape[0]:
                    return None  # F.embedding raises
                padding_idx %= weight.shape[0]
            return (input, weight, padding_idx), {}

        return canonical(*args, **kwargs)

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Dims of ids; features; vocabulary (partial); a partial weight."""
        ndim = len(view.in_shapes[0])
        rows: list[Row] = [((dim, R), (dim,)) for dim in range(ndim)]
        rows += [((R, 1), (ndim,)), ((R, 0), (P,)), ((R, P), (P,))]
        return finish(view, rows, "hand")

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Lookup of the ids in this rank's part of the vocabulary; an id outside the whole vocabulary raises as ever."""
        padding = ctx.node.args[2]
        if self.plain(ctx):
            return lambda tensors: F.embedding(tensors[0], tensors[1], padding)
        part = self.part(ctx)
        held = padding is not None and part.start <= padding < part.start + part.length
        own_padding = padding - part.start if held else None

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            ids, weight = tensors
            elsewhere = part.elsewhere(ids)
            rows = F.embedding((ids - part.start).masked_fill(elsewhere, 0), weight, own_padding)
            return rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)

        return run
