"""torch's fused attention kernels with their log-sum-exp, under the private names that torch gives them."""

from __future__ import annotations

from typing import Any

import torch

Tensor = torch.Tensor
aten = torch.ops.aten

_CPU = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_CUDA = (torch.bfloat16, torch.float16)
# the widest head of the flash kernels; a multiple of 8
_CUDA_FEATURES = 256


def has_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether :func:`forward` takes queries like ``q`` [b, h, l, e] with values like ``v`` [b, h, s, f]."""
    e, f = q.shape[-1], v.shape[-1]
    if q.dim() != 4 or e != f or not e:
        return False
    if q.device.type == "cpu":
        return q.dtype in _CPU
    return q.device.type == "cuda" and q.dtype in _CUDA and e % 8 == 0 and e <= _CUDA_FEATURES


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(output [b, h, l, e], log-sum-exp [b, h, l] in float32 or wider); ``causal`` for square blocks only."""
    if q.device.type == "cpu":
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
    else:
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
    return out[0], out[1]


def backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v of one block; ``out`` and ``lse`` are those over ALL keys of the queries."""
    if q.device.type == "cpu":
        grads: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, scale=scale
        )
    else:
        seed = torch.empty((2,), dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        none: Any = None
        grads = aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, none, none, q.shape[-2], k.shape[-2], 0.0, causal, seed, unused, scale=scale
        )  # fmt: skip
    return grads[0], grads[1], grads[2]
