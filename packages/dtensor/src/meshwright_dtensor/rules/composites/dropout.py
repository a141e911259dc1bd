"""torch.nn.functional.dropout with the mask of one device, whatever the layout."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor import dropout_noise
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.drawing.whole import Kind
from meshwright_dtensor.random import PIECE_NUMEL, draw_part
from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, finish
from meshwright_dtensor.sharding.boxes import dim_order_of, has_gaps
from meshwright_dtensor.sharding.states import P


class Dropout(Composite):
    """x -> x * mask / (1 - p).  The mask is drawn whole on every rank, in the memory order of x, and sliced."""

    name: ClassVar[str] = "dropout"
    functions: ClassVar[tuple[Any, ...]] = (F.dropout,)

    @from_call
    def normalise(
        self, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Bound | None:
        """(x, p, training, inplace)."""
        return ((input, p, training, inplace), {}) if 0.0 <= p <= 1.0 else None

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Any dim; a partial sum too, since all ranks use the same mask."""
        rows: list[Row] = [((dim,), (dim,)) for dim in range(len(view.in_shapes[0]))]
        return finish(view, [*rows, ((P,), (P,))], "hand")

    def plain(self, ctx: LocalContext) -> bool:
        """If nothing is random; else the mask follows the strides of one device, which the local tensor may not have."""
        _, p, training, _ = ctx.node.args
        return not training or p in (0.0, 1.0)

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Multiply with the rank's slice of the noise."""
        _, p, training, inplace = ctx.node.args
        if self.plain(ctx):
            return lambda tensors: F.dropout(tensors[0], p, training, inplace)
        shape = ctx.in_shapes[0]
        box = ctx.region(shape, ctx.ins[0])

        def run(tensors: list[torch.Tensor]) -> torch.Tensor:
            x = tensors[0]
            order = dim_order_of(torch.empty_like(x, device="meta"))
            gaps = has_gaps(x, shape)
            noise = draw_part(
                lambda full: noise_(full, p, fused=not inplace),
                shape,
                order,
                x.dtype,
                x.device,
                box,
                piece_numel=PIECE_NUMEL,
                gaps=gaps,
                kind=kind_of_noise(x.device, p, fused=not inplace),
                per_shard=ctx.per_shard,
            )
            return x.mul_(noise) if inplace else x * noise

        return run


def noise_(full: torch.Tensor, p: float, fused: bool = True) -> torch.Tensor:
    """Fill with 0 or 1 / (1 - p), as ``torch.dropout`` draws it on this device.

    `fused`: accelerators draw and multiply in one kernel, which uses the stream in another way; not in place.
    """
    if kind_of_noise(full.device, p, fused).name == "noise_":
        return full.bernoulli_(1 - p).div_(1 - p)
    return dropout_noise.dropout_noise_(full, p)


def kind_of_noise(device: torch.device, p: float, fused: bool = True) -> Kind:
    """What `noise_` does there."""
    return Kind("dropout_noise_" if fused and device_of(device).fused_dropout else "noise_", (p,))
