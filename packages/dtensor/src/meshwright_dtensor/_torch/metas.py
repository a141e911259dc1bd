"""Meta kernels and FLOP formulas that torch lacks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

import torch

Tensor = torch.Tensor


def grouped_mm(
    a: Tensor, b: Tensor, offs: Tensor | None = None, bias: Tensor | None = None, out_dtype: Any = None
) -> Tensor:
    """``aten._grouped_mm`` in any dtype; torch's meta kernel takes bfloat16 only, its CPU kernel every float type.

    2-D x 3-D and 3-D x 2-D give (M, N), 3-D x 3-D and 2-D x 2-D give (groups, M, N).
    """
    m, n = a.shape[-2], b.shape[-1]
    if a.dim() == b.dim():
        groups = a.shape[0] if a.dim() == 3 else (offs.shape[0] if offs is not None else 1)
        return a.new_empty((groups, m, n), dtype=out_dtype or a.dtype)
    return a.new_empty((m, n), dtype=out_dtype or a.dtype)


METAS: MappingProxyType[Any, Callable[..., Tensor]] = MappingProxyType(
    {torch.ops.aten._grouped_mm.default: grouped_mm}
)
"""Op overload -> its meta kernel."""


def grouped_mm_flops(a: Tensor, b: Tensor, *_: Any, **__: Any) -> int:
    """Operations of ``aten._grouped_mm``: every row of a 2-D operand is multiplied by the matrix of one group."""
    groups = a.shape[0] if a.dim() == 3 and b.dim() == 3 else 1
    return 2 * groups * int(a.shape[-2]) * int(a.shape[-1]) * int(b.shape[-1])


def attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Operations of the two products of fused attention, masked or not."""
    batch, width, out_width = query.shape[:-1], query.shape[-1], value.shape[-1]
    return 2 * math.prod(batch) * int(key.shape[-2]) * int(width + out_width)


def rnn_layer_flops(x: Tensor, by_input: Tensor, by_state: Tensor, *_: Any, **__: Any) -> int:
    """Operations of one layer of an LSTM on a CPU: each row and step of ``x`` is multiplied by both weights."""
    return 2 * math.prod(x.shape[:-1]) * (by_input.numel() + by_state.numel())


def rnn_flops(x: Tensor, weights: Sequence[Tensor], *_: Any, **__: Any) -> int:
    """Operations of a fused RNN of several layers, as on GPUs: each step is multiplied by every weight."""
    return 2 * math.prod(x.shape[:-1]) * sum(w.numel() for w in weights if w.dim() == 2)


FLOPS: MappingProxyType[Any, Callable[..., int]] = MappingProxyType(
    {
        torch.ops.aten._grouped_mm.default: grouped_mm_flops,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: attention_flops,
        torch.ops.aten.mkldnn_rnn_layer.default: rnn_layer_flops,
        torch.ops.aten._cudnn_rnn.default: rnn_flops,
    }
)
"""Op overload -> operations of a call, where torch's own counter has no formula."""
