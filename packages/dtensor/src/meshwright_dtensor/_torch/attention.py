"""torch's fused attention kernels with their log-sum-exp, under the private names that torch gives them."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Tensor = torch.Tensor
aten = torch.ops.aten

MATH, FLASH, EFFICIENT = 0, 1, 2
"""torch's kernels of attention, by its numbers."""


class AttentionKernels(Protocol):
    """Fused attention of a device that gives the log-sum-exp of each query, and takes that of all keys back."""

    def takes(self, q: Tensor, v: Tensor) -> bool:
        """Whether it takes queries like ``q`` [b, h, l, e] with values like ``v`` [b, h, s, e]."""
        ...

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """(output [b, h, l, e], log-sum-exp [b, h, l] in float32 or wider); ``causal`` for square blocks only."""
        ...

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v of one block; ``out`` and ``lse`` are those over ALL keys of the queries."""
        ...


class CpuAttention:
    """Torch's flash attention for CPUs."""

    def takes(self, q: Tensor, v: Tensor) -> bool:
        """Of all floating-point dtypes."""
        return q.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See AttentionKernels."""
        out = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=scale)
        return out[0], out[1]

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernels."""
        grads: Any = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, causal, scale=scale
        )
        return grads[0], grads[1], grads[2]


class FlashAttention:
    """Torch's flash attention for GPUs."""

    # the widest head of its kernels; a multiple of 8
    features = 256

    def takes(self, q: Tensor, v: Tensor) -> bool:
        """In half precision, of heads that are a multiple of 8 wide."""
        e = q.shape[-1]
        return q.dtype in (torch.bfloat16, torch.float16) and e % 8 == 0 and e <= self.features

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
        """See AttentionKernels."""
        out = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)
        return out[0], out[1]

    def backward(
        self,
        gradient: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See AttentionKernels."""
        seed = torch.empty((2,), dtype=torch.uint64, device=q.device)
        unused = torch.empty((), dtype=torch.uint64, device=q.device)
        none: Any = None
        grads = aten._scaled_dot_product_flash_attention_backward(
            gradient, q, k, v, out, lse, none, none, q.shape[-2], k.shape[-2], 0.0, causal, seed, unused, scale=scale
        )  # fmt: skip
        return grads[0], grads[1], grads[2]


def chosen(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, p: float, causal: bool, scale: float | None
) -> int:
    """The number of the kernel that ``scaled_dot_product_attention`` runs with these arguments."""
    grouped = q.dim() > 2 and k.shape[-3] != q.shape[-3]
    number: int = torch._fused_sdp_choice(q, k, v, mask, p, causal, scale=scale, enable_gqa=grouped)
    return number


def efficient_kept(full: Tensor, p: float, generator: Any) -> Tensor:
    """Which weights the memory-efficient kernel keeps; the generator advances as by the kernel."""
    seed, offset = generator.initial_seed(), generator.get_offset()
    drawn = torch.empty(full.shape, dtype=torch.float32, device=full.device)
    # the operation takes signed numbers of 64 bits
    seed = seed - (1 << 64) if seed >= 1 << 63 else seed
    aten._fill_mem_eff_dropout_mask_(drawn, p, seed, offset)
    generator.set_offset(offset + -(-full.numel() // 4) * 4)
    return drawn > p


def flash_kept(q: Tensor, k: Tensor, v: Tensor, p: float, causal: bool, scale: float | None) -> Tensor:
    """Which weights the flash kernel keeps: it shows the others as negative, for tests of its own."""
    # torch pads the features to a multiple of 8
    q, k, v = (torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)) for t in (q, k, v))
    shown = aten._scaled_dot_product_flash_attention(q, k, v, p, causal, True, scale=scale)[8]
    return shown[..., : q.shape[-2], : k.shape[-2]] >= 0
