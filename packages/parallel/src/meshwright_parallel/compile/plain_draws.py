"""Dropout of plain tensors, in a pipeline stage on one rank, with random numbers that are drawn apart from it.

Values of a mesh have it from their own rules (`meshwright_dtensor.random.DRAWS`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.devices import on_host
from meshwright_dtensor.random import draw_part
from meshwright_dtensor.rules.composites.dropout import noise_
from meshwright_dtensor.rules.composites.sdpa_blocks import attention
from meshwright_dtensor.sharding.boxes import dim_order_of, has_gaps, whole_box

Tensor = torch.Tensor


class PlainDraws(TorchFunctionMode):
    """Inside, dropout of plain tensors takes its mask from `draw_part`, and multiplies."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout and _is_plain(args[0] if args else kwargs.get("input")):
            return _dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention and all(map(_is_plain, args[:3])) and len(args) > 2:
            return _attention(*args, **kwargs)
        return func(*args, **kwargs)


def _is_plain(value: Any) -> bool:
    """Whether no rule of meshwright's runs the call."""
    return isinstance(value, Tensor) and not hasattr(value, "_layout")


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or not 0.0 < p < 1.0:
        return F.dropout(input, p, training, inplace)
    shape = tuple(input.shape)
    noise = draw_part(
        partial(noise_, p=p, fused=not inplace),
        shape,
        dim_order_of(torch.empty_like(input, device="meta")),
        input.dtype,
        input.device,
        whole_box(shape),
        gaps=has_gaps(input, shape),
    )
    return input.mul_(noise) if inplace else input * noise


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if not 0.0 < dropout_p < 1.0 or not on_host(query.device):
        # the masks of accelerators' kernels depend on the kernel, which is chosen by the tensors
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
    shape = (*query.shape[:-1], key.shape[-2])
    noise = draw_part(
        partial(noise_, p=dropout_p), shape, range(len(shape)), query.dtype, query.device, whole_box(shape)
    )
    return attention(query, key, value, attn_mask, noise, is_causal, scale, enable_gqa)
