"""Local attention with a sequence sharded over ranks (context parallel): all-gather, ring, or all-to-all to heads."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from meshwright_dtensor import dropout_noise
from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.comm.redistribute import conversion_between
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.random import DRAWS, PIECE_NUMEL, draw_part
from meshwright_dtensor.rules.composites.base import LocalContext, LocalFunction
from meshwright_dtensor.rules.composites.dropout import noise_
from meshwright_dtensor.rules.composites.sdpa_blocks import attention
from meshwright_dtensor.rules.composites.sdpa_heads import HeadExchange
from meshwright_dtensor.rules.composites.sdpa_ring import Ranks, SharedAttention
from meshwright_dtensor.sharding.boxes import Region, cut_intervals
from meshwright_dtensor.sharding.states import R, X

Tensor = torch.Tensor


def key_axes(ctx: LocalContext) -> list[int]:
    """Mesh axes on which the keys of this call are sharded on the sequence, outermost first."""
    return ctx.axes_sharding(1, len(ctx.in_shapes[1]) - 2)


def shares_sequence(ctx: LocalContext) -> bool:
    """Whether attention crosses shards of the sequence, or is causal on sharded queries."""
    causal: bool = ctx.node.args[5]
    return bool(key_axes(ctx)) or (causal and bool(ctx.axes_sharding(0, len(ctx.in_shapes[0]) - 2)))


def local_attention(ctx: LocalContext) -> LocalFunction:
    """Attention of this rank's queries over the keys of all ranks."""
    axes = key_axes(ctx)
    alone = len(axes) == 1 and axes == ctx.axes_sharding(0, len(ctx.in_shapes[0]) - 2)
    form = ctx.attention[axes[0]] if alone else "all_gather"
    uneven = form == "all_to_all" and _uneven(ctx, axes[0])
    if form == "all_to_all" and not uneven:
        return _by_heads(ctx, axes[0])
    mask, p = ctx.node.args[3:5]
    ranks, scale = _ranks(ctx, axes, form == "ring"), ctx.node.args[6]
    if scale is None:
        scale = 1.0 / math.sqrt(max(ctx.in_shapes[0][-1], 1))
    draw = noise_of(ctx) if p else None

    def run(tensors: list[Tensor], site: Site = NOWHERE) -> Tensor:
        q, k, v = _broadcast(*tensors[:3])
        bias = tensors[3] if mask is not None else None
        # made for whole sequences
        if uneven and bias is not None and bias.dim() > 1 and bias.shape[-2] != 1:
            bias = torch.cat([bias.narrow(-2, *interval) for interval in ranks.queries], -2)
        noise = None if draw is None else draw(tensors)
        out: Tensor = SharedAttention.apply(q, k, v, bias, noise, scale, ranks, site)
        return out

    return run


def _uneven(ctx: LocalContext, axis: int) -> bool:
    """Whether ranks hold different lengths of a sequence (a model dropped a token), which all-to-all cannot exchange."""
    dim = len(ctx.in_shapes[0]) - 2
    inputs = (ctx.intervals_along(place, dim, axis) for place in (0, 1))
    return any(len({sum(length for _, length in part) for part in held}) > 1 for held in inputs)


def _broadcast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with broadcast batch dims; k and v may have fewer heads (dim -3)."""
    batch = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
    heads = [t.shape[-3:-2] for t in (q, k, v)]
    if heads[1] != heads[2]:
        heads[1:] = [max(heads[1:])] * 2
    q, k, v = (t.expand(*batch, *h, *t.shape[-2:]) for t, h in zip((q, k, v), heads, strict=True))
    return q, k, v


def _ranks(ctx: LocalContext, axes: list[int], ring: bool) -> Ranks:
    """The ranks that share the sequence and their keys; without ``axes`` each rank has all keys."""
    causal: bool = ctx.node.args[5]
    dim = len(ctx.in_shapes[0]) - 2
    queries = ctx.intervals(0, dim)
    if not axes:
        whole = ((0, ctx.in_shapes[1][dim]),)
        return Ranks(None, "", 0, queries, (whole,), causal, False, lambda t, s, p: t, lambda t, s: t)
    k, v = ctx.in_shapes[1:3]
    whole_keys = tuple(X if axis in axes else s for axis, s in enumerate(ctx.ins[1]))
    to_all = conversion_between(ctx.context, ctx.ins[1], whole_keys, torch.Size((*k[:-1], k[-1] + v[-1])))
    assert to_all is not None
    # its backward is the same gather, logged as backward
    dual = to_all.dual()

    def gather(t: Tensor, site: Site, phase: str) -> Tensor:
        return to_all.forward(t, site) if phase == "forward" else dual.backward(t, site)

    axis = axes[0]
    name, keys = ctx.context.axes[axis], ctx.intervals_along(1, dim, axis)
    return Ranks(ctx.group(axis), name, ctx.rank(axis), queries, keys, causal, ring, gather, to_all.backward)


def weights(ctx: LocalContext) -> tuple[tuple[int, ...], Region]:
    """The global shape of the weights of attention, and this rank's part of them."""
    shape = (*ctx.out_shapes[0][:-1], ctx.in_shapes[1][-2])
    # the features of the output are not a dim of the weights
    states = (s if isinstance(s, int) and int(s) != len(shape) - 1 else R for s in ctx.outs[0])
    return shape, ctx.region(shape, tuple(states))


def noise_of(ctx: LocalContext, region: Region | None = None) -> Callable[[Sequence[Tensor]], Tensor]:
    """A function that draws a part of one device's dropout mask: ``region`` of the weights, by default this rank's queries.

    It takes the local queries, keys, values and mask.
    """
    p: float = ctx.node.args[4]
    causal, scale = ctx.node.args[5:7]
    k, v = ctx.in_shapes[1:3]
    sizes = (k[-3] if len(k) > 2 else 1, k[-1], v[-1])
    shape, of_rank = weights(ctx)
    region = of_rank if region is None else region
    per_shard = ctx.per_shard

    def draw(tensors: Sequence[Tensor]) -> Tensor:
        q = tensors[0]
        forms: Sequence[Tensor | None] = ()
        if not on_host(q.device) and not per_shard:
            of_mask = tensors[3] if ctx.node.args[3] is not None else None
            forms = (*tensors[:3], of_mask)
            if DRAWS.taken is not None:
                # the draw is kept, and may not keep values
                forms = [None if t is None else _form(t) for t in forms]

        def fill(full: Tensor) -> Tensor:
            if not forms:
                return noise_(full, p)
            return dropout_noise.attention_noise_(full, p, forms, sizes, causal, scale)

        # kernels of accelerators draw the mask of a whole tensor in ways of their own
        piece = None if forms else PIECE_NUMEL
        return draw_part(
            fill,
            shape,
            range(len(shape)),
            q.dtype,
            q.device,
            region,
            piece_numel=piece,
            per_shard=per_shard,
        )

    return draw


def _form(t: Tensor) -> Tensor:
    """A tensor of the same form without memory."""
    form = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")
    return form.requires_grad_(t.requires_grad)


# ---- all-to-all to heads
def _by_heads(ctx: LocalContext, axis: int) -> LocalFunction:
    """All-to-all to whole sequences with sharded heads, plain attention, all-to-all back."""
    mask, p, causal, scale, grouped = ctx.node.args[3:]
    n, rank, name = ctx.size(axis), ctx.rank(axis), ctx.context.axes[axis]
    dim = len(ctx.in_shapes[0]) - 2
    bare = tuple(R if a == axis else s for a, s in enumerate(ctx.ins[0]))
    region = ctx.region(ctx.in_shapes[0], bare)
    heads = sum(length for _, length in region[dim - 1])
    if heads % n:
        raise UnsupportedError(
            f"attention over {heads} heads cannot be spread over the {n} ranks of mesh axis {name!r}: all_to_all needs "
            "a multiple; use context attention 'ring' or 'all_gather', or fewer ranks"
        )
    local_heads = tuple(cut_intervals(region[dim - 1], rank * (heads // n), heads // n))
    queries = ctx.intervals_along(0, dim, axis)
    keys = ctx.intervals_along(1, dim, axis)
    whole = (((0, ctx.out_shapes[0][-2]),), ((0, ctx.in_shapes[1][-2]),))
    draw = noise_of(ctx, (*region[: dim - 1], local_heads, *whole)) if p else None

    exchange = HeadExchange(ctx.context, axis)

    def run(tensors: list[Tensor], site: Site = NOWHERE) -> Tensor:
        q, k, v = _broadcast(*tensors[:3])
        # the fewest repeats of each key head so that the ranks have equally many
        times = n // math.gcd(k.shape[-3], n)
        if q.shape[-3] % (k.shape[-3] * times):
            times = q.shape[-3] // k.shape[-3]
        if times > 1:
            k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
        q, k, v = exchange.whole_sequences((q, k, v), (queries, keys, keys), site)
        bias = tensors[3] if mask is not None else None
        if bias is not None and bias.dim() >= 3 and bias.shape[-3] != 1:
            bias = bias.narrow(-3, rank * (heads // n), heads // n)
        noise = None if draw is None else draw(tensors)
        out = attention(q, k, v, bias, noise, causal, scale, grouped or k.shape[-3] != q.shape[-3])
        return exchange.parts((out,), (queries,), site)[0]

    return run
