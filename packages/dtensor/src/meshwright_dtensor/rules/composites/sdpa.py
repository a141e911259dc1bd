"""torch.nn.functional.scaled_dot_product_attention as one node."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.drawing.shard_streams import shard_stream
from meshwright_dtensor.random import DRAWS
from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.composites.sdpa_blocks import attention
from meshwright_dtensor.rules.composites.sdpa_context import (
    local_attention,
    noise_of,
    shares_sequence,
    weights,
)
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, broadcast_state, finish, numel
from meshwright_dtensor.sharding.states import P, R, State, is_shard


class ScaledDotProductAttention(Composite):
    """q [..., h, l, e], k [..., g, s, e], v [..., g, s, f], mask broadcast to [..., h, l, s] -> [..., h, l, f]."""

    name: ClassVar[str] = "sdpa"
    located: ClassVar[bool] = True
    functions: ClassVar[tuple[Any, ...]] = (F.scaled_dot_product_attention,)

    @from_call
    def normalise(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Bound | None:
        """(q, k, v, mask, dropout_p, is_causal, scale, enable_gqa); q, k and v of unequal rank are not handled."""
        rank, p = query.dim(), float(dropout_p)
        if not rank == key.dim() == value.dim() or rank < 2 or not 0.0 <= p < 1.0:
            return None
        if attn_mask is not None and attn_mask.dim() > rank:
            return None
        return (query, key, value, attn_mask, p, bool(is_causal), scale, bool(enable_gqa)), {}

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Batch dims; heads (of q and kv together); features of v; queries, unless causal; a partial v; the sequence."""
        q, k, v, *masks = view.in_shapes
        causal, grouped = view.node.args[5], view.node.args[7]
        ndim, scores = len(q), (*view.out_shapes[0][:-1], k[-2])
        rows: list[Row] = []

        def add(states: tuple[State, State, State], out: State, mask_dim: int | None = None) -> None:
            of_masks = (R if mask_dim is None else broadcast_state(mask_dim, scores, mask) for mask in masks)
            rows.append(((*states, *of_masks), (out,)))

        for dim in range(ndim - 2):
            sizes = {t[dim] for t in (q, k, v)}
            if grouped and dim == ndim - 3 and k[dim] == v[dim]:
                if q[dim] == k[dim]:
                    add((dim, dim, dim), dim, dim)
                elif k[dim] == 1:
                    add((dim, R, R), dim, dim)
                elif q[dim] % view.n == 0 and k[dim] % view.n == 0:
                    # contiguous query heads stay with their group of key heads
                    add((dim, dim, dim), dim, dim)
            elif len(sizes - {1}) == 1:
                q_state, k_state, v_state = (dim if t[dim] != 1 else R for t in (q, k, v))
                add((q_state, k_state, v_state), dim, dim)
        add((R, R, ndim - 1), ndim - 1)
        add((R, R, P), P)
        if not causal or view.attention is not None:
            add((ndim - 2, R, R), ndim - 2, ndim - 2)
        if view.attention is not None and ndim > 2:
            # context parallel: the communication is inside (sdpa_context)
            add((ndim - 2,) * 3, ndim - 2, None if view.attention == "all_to_all" else ndim - 2)
        return finish(view, rows, "hand")

    def plain(self, ctx: LocalContext) -> bool:
        """Unless dropout applies to a shard, or attention crosses shards of the sequence."""
        if shares_sequence(ctx):
            return False
        return ctx.node.args[4] == 0.0 or not any(is_shard(s) for states in ctx.ins for s in states)

    def local(self, ctx: LocalContext) -> LocalFunction:
        """The function itself; with dropout, the same in steps with the rank's slice of one device's mask."""
        _, _, _, mask, p, causal, scale, grouped = ctx.node.args
        if shares_sequence(ctx):
            return local_attention(ctx)
        dropping = not self.plain(ctx)
        draw, (shape, region) = noise_of(ctx), weights(ctx)
        # with features that are sharded, ranks would choose their kernels by other sizes, and these draw other masks
        alone = ctx.per_shard and not ctx.axes_sharding(2, len(shape) - 1)

        def attend(tensors: list[torch.Tensor], site: Site = NOWHERE) -> torch.Tensor:
            q, k, v = tensors[:3]
            bias = tensors[3] if mask is not None else None
            if not dropping and not (p and DRAWS.taken is not None):
                return F.scaled_dot_product_attention(
                    q, k, v, bias, dropout_p=p, is_causal=causal, scale=scale, enable_gqa=grouped
                )
            if alone and dropping and DRAWS.taken is None:
                record = device_of(q.device)
                stream = record.generator(q.device)
                with shard_stream(stream, q.device, shape, region, record.seed_stream):
                    return F.scaled_dot_product_attention(
                        q, k, v, bias, dropout_p=p, is_causal=causal, scale=scale, enable_gqa=grouped
                    )
            return attention(q, k, v, bias, draw(tensors), causal, scale, grouped)

        return attend

    def flops(self, view: NodeView) -> float:
        """Two products, halved when causal."""
        q, k, v = view.in_shapes[:3]
        full = 2.0 * numel(view.out_shapes[0][:-1]) * k[-2] * (q[-1] + v[-1])
        return full / 2 if view.node.args[5] else full
