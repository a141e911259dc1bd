"""Attention on plain tensors with a given dropout mask."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    noise: torch.Tensor | None,
    causal: bool,
    scale: float | None,
    grouped: bool,
) -> torch.Tensor:
    """torch's attention; with ``noise`` the same in steps, with the weights multiplied by it."""
    if noise is None:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    if grouped and k.shape[-3] != q.shape[-3]:
        times = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(times, -3), v.repeat_interleave(times, -3)
    return (attention_weights(q, k, mask, causal, scale) * noise) @ v


def attention_weights(
    q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> torch.Tensor:
    """softmax(q k^T * scale + mask) over the last dim; a query without visible keys gets zeros, as in torch."""
    factor = 1.0 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale
    # shared between q and k, as torch does against overflow
    root = math.sqrt(abs(factor))
    scores = (q * math.copysign(root, factor)) @ (k * root).transpose(-2, -1)
    if causal:
        rows, columns = scores.shape[-2:]
        mask = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype is torch.bool else scores + mask
    blind = (scores == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)
