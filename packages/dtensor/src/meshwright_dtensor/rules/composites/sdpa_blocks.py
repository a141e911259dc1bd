"""Attention on plain tensors: blockwise over shards of the sequence, merged by log-sum-exp; whole with a given dropout mask.

A rank holds some intervals of the queries, and gets some intervals of the keys at a time. The causal mask is applied here,
on global positions: masked blocks are not computed. The others are full rectangles and square triangles, the two shapes
that fused kernels take.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from meshwright_dtensor._torch.attention import AttentionKernels
from meshwright_dtensor.devices import device_of
from meshwright_dtensor.sharding.intervals import Interval

Tensor = torch.Tensor

PIECE = 1 << 26
"""Scores in memory at a time without a fused kernel (masks and dropout)."""


@dataclass(frozen=True, slots=True)
class Block:
    """A rectangle of scores.

    Attributes:
        rows: first local query and how many.
        columns: first local key and how many.
        position: global position of the first key, by which masks are cut.
        triangle: query i of a square block sees keys 0..i only.
    """

    rows: Interval
    columns: Interval
    position: int
    triangle: bool = False

    @property
    def count(self) -> int:
        """(query, key) pairs that are attended to."""
        length = self.rows[1]
        return length * (length + 1) // 2 if self.triangle else length * self.columns[1]


def blocks(queries: Sequence[Interval], keys: Sequence[Interval], causal: bool) -> list[Block]:
    """The blocks of queries and keys in these global intervals; rows and columns are local positions."""
    result: list[Block] = []
    row = 0
    for start, length in queries:
        column = 0
        for first, count in keys:
            if causal:
                result += _causal(row, start, length, column, first, count)
            else:
                result.append(Block((row, length), (column, count), first))
            column += count
        row += length
    return [b for b in result if b.rows[1] and b.columns[1]]


def _causal(row: int, start: int, length: int, column: int, first: int, count: int) -> list[Block]:
    """Blocks of one interval of queries and one of keys: keys before the queries, the triangle, queries after the keys."""
    # keys that all of the queries see
    before = max(0, min(count, start - first))
    result = [Block((row, length), (column, before), first)]
    column, first, count = column + before, first + before, count - before
    # queries that see none of the rest
    late = max(0, first - start)
    row, start, length = row + late, start + late, length - late
    side = min(length, count)
    if side > 0:
        result.append(Block((row, side), (column, side), first, triangle=True))
        result.append(Block((row + side, length - side), (column, side), first))
    return result


@dataclass(frozen=True, slots=True)
class Terms:
    """Scale, mask and dropout mask, shared by all blocks of a call.

    Attributes:
        scale: factor on the scores.
        mask: [..., queries, ALL keys] of bool (True: attend) or added to the scores; sizes 1 are broadcast.
        noise: dropout mask that multiplies the weights, [..., queries, ALL keys].
    """

    scale: float
    mask: Tensor | None = None
    noise: Tensor | None = None

    @property
    def bare(self) -> bool:
        """Whether fused kernels apply."""
        return self.mask is None and self.noise is None


class Merged:
    """Output and log-sum-exp of queries over the keys seen so far."""

    def __init__(self, q: Tensor, features: int) -> None:
        wide = torch.promote_types(q.dtype, torch.float32)
        self.out = q.new_zeros((*q.shape[:-1], features), dtype=wide)
        self.lse = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        self._seen: list[Interval] = []

    def add(self, rows: Interval, out: Tensor, lse: Tensor) -> None:
        """Merge the result of the queries `rows` over more keys."""
        old, target, lse = self.lse.narrow(-1, *rows), self.out.narrow(-2, *rows), lse.to(self.lse.dtype)
        start, count = rows
        first = all(start >= at + seen or at >= start + count for at, seen in self._seen)
        self._seen.append(rows)
        if first:
            target.copy_(out)
            old.copy_(lse)
            return
        new = torch.logaddexp(old, lse)
        # the weight of what is added; a query that has seen no key yet, and sees none here, keeps its zeros
        weight = torch.exp(lse - new).nan_to_num_(0.0).unsqueeze(-1)
        target.lerp_(out.to(target.dtype), weight)
        old.copy_(new)


def _kernels(q: Tensor, v: Tensor) -> AttentionKernels | None:
    """The fused attention of the device for these queries and values, None where it has none."""
    kernels = device_of(q.device).attention
    if kernels is None or q.dim() != 4 or not q.shape[-1] or q.shape[-1] != v.shape[-1]:
        return None
    return kernels if kernels.takes(q, v) else None


def attend(q: Tensor, k: Tensor, v: Tensor, parts: Iterable[Block], terms: Terms, into: Merged) -> None:
    """Merge into ``into`` the attention of ``q`` [b, h, l, e] over ``k`` [b, g, s, e], ``v`` [b, g, s, f]; g divides h."""
    for block in parts:
        qb, kb, vb = q.narrow(-2, *block.rows), *_keys(q, k, v, block)
        kernels = _kernels(qb, vb) if terms.bare else None
        if kernels is not None:
            out, lse = kernels.forward(qb, kb, vb, block.triangle, terms.scale)
            into.add(block.rows, out, lse)
            continue
        for piece in _pieces(block, q):
            scores = _scores(q, kb, piece, terms)
            lse = torch.logsumexp(scores, -1)
            weights = scores.sub_(lse.unsqueeze(-1)).exp_().nan_to_num_(0.0)
            noise = _cut(terms.noise, piece, weights)
            kept = weights if noise is None else weights.mul_(noise)
            into.add(piece.rows, kept @ vb.to(kept.dtype), lse)


def attend_backward(
    gradient: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    parts: Iterable[Block],
    terms: Terms,
    grads: tuple[Tensor, Tensor, Tensor],
    mask_grad: Tensor | None = None,
) -> None:
    """Add the gradients through these blocks to ``grads`` (of q, k, v, in float32 or wider) and ``mask_grad``."""
    dq, dk, dv = grads
    for block in parts:
        kb, vb = _keys(q, k, v, block)
        kernels = _kernels(q, vb) if terms.bare else None
        if kernels is not None:
            cut = [t.narrow(-2, *block.rows) for t in (gradient, q, out)]
            rows = lse.narrow(-1, *block.rows)
            a, b, c = kernels.backward(cut[0], cut[1], kb, vb, cut[2], rows, block.triangle, terms.scale)
            dq.narrow(-2, *block.rows).add_(a)
            dk.narrow(-2, *block.columns).add_(_to_groups(b, dk))
            dv.narrow(-2, *block.columns).add_(_to_groups(c, dv))
            continue
        for piece in _pieces(block, q):
            go, o = (t.narrow(-2, *piece.rows).to(dq.dtype) for t in (gradient, out))
            weights = _scores(q, kb, piece, terms).sub_(lse.narrow(-1, *piece.rows).unsqueeze(-1))
            weights = weights.exp_().nan_to_num_(0.0)
            noise = _cut(terms.noise, piece, weights)
            dropped = weights if noise is None else weights * noise
            dv.narrow(-2, *piece.columns).add_(_to_groups(dropped.transpose(-2, -1) @ go, dv))
            slope = go @ vb.to(go.dtype).transpose(-2, -1)
            slope = (slope if noise is None else slope.mul_(noise)).sub_((go * o).sum(-1, keepdim=True))
            slope = slope.mul_(weights)
            if mask_grad is not None:
                target = _narrow(mask_grad, piece)
                target.add_(slope.sum_to_size(target.shape))
            slope = slope.mul_(terms.scale)
            dq.narrow(-2, *piece.rows).add_(slope @ kb.to(slope.dtype))
            rows = q.narrow(-2, *piece.rows).to(slope.dtype)
            dk.narrow(-2, *piece.columns).add_(_to_groups(slope.transpose(-2, -1) @ rows, dk))


def _pieces(block: Block, q: Tensor) -> list[Block]:
    """The block cut along its queries, so that no more than PIECE scores exist at a time."""
    each = math.prod(q.shape[:-2]) * block.columns[1]
    step = max(1, PIECE // max(1, each))
    if block.triangle or step >= block.rows[1]:
        return [block]
    start, end = block.rows[0], sum(block.rows)
    return [Block((at, min(step, end - at)), block.columns, block.position) for at in range(start, end, step)]


def _keys(q: Tensor, k: Tensor, v: Tensor, block: Block) -> tuple[Tensor, Tensor]:
    """Keys and values of the block, a copy for every head of the queries."""
    kb, vb = k.narrow(-2, *block.columns), v.narrow(-2, *block.columns)
    if k.dim() < 3 or k.shape[-3] == q.shape[-3]:
        return kb, vb
    times = q.shape[-3] // k.shape[-3]
    return kb.repeat_interleave(times, -3), vb.repeat_interleave(times, -3)


def _to_groups(gradient: Tensor, like: Tensor) -> Tensor:
    """The gradient of repeated heads, summed per group."""
    if gradient.dim() < 3 or gradient.shape[-3] == like.shape[-3]:
        return gradient
    groups = like.shape[-3]
    return gradient.unflatten(-3, (groups, gradient.shape[-3] // groups)).sum(-3, dtype=like.dtype)


def _scores(q: Tensor, k: Tensor, block: Block, terms: Terms) -> Tensor:
    """Scaled and masked scores of the block, in float32 or wider."""
    wide = torch.promote_types(q.dtype, torch.float32)
    # shared between q and k, as torch does against overflow
    root = math.sqrt(abs(terms.scale))
    rows = q.narrow(-2, *block.rows).to(wide) * math.copysign(root, terms.scale)
    scores = rows @ (k.to(wide) * root).transpose(-2, -1)
    if block.triangle:
        above = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(above, -math.inf)
    mask = _cut(terms.mask, block, scores)
    if mask is None:
        return scores
    return scores.masked_fill_(~mask, -math.inf) if mask.dtype is torch.bool else scores.add_(mask)


def _cut(tensor: Tensor | None, block: Block, like: Tensor) -> Tensor | None:
    if tensor is None:
        return None
    cut = _narrow(tensor, block)
    return cut if cut.dtype is torch.bool else cut.to(like.dtype)


def _narrow(tensor: Tensor, block: Block) -> Tensor:
    """The part of a mask or of noise that belongs to the block."""
    if tensor.dim() >= 2 and tensor.shape[-2] != 1:
        tensor = tensor.narrow(-2, *block.rows)
    return tensor if tensor.shape[-1] == 1 else tensor.narrow(-1, block.position, block.columns[1])


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    noise: Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> Tensor:
    """torch's attention of whole sequences; with ``noise`` the same in steps, with the weights multiplied by it."""
    if noise is None:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if grouped and k.shape[-3] != q.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    factor = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    # shared between q and k, as torch does against overflow
    root = math.sqrt(abs(factor))
    scores = (q * math.copysign(root, factor)) @ (k * root).transpose(-2, -1)
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    # a query without visible keys gets zeros, as in torch
    blind = (scores == -math.inf).all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
    return (weights * noise) @ v
