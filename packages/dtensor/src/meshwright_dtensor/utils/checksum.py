"""Checksums of tensors, by which ranks find out that they hold different values."""

from __future__ import annotations

import torch

# words that are converted to int64 at a time
_CHUNK = 2**22
_MASK = (1 << 62) - 1
# by bytes of an element; sums of longer words would lose their highest bits
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def checksum(tensor: torch.Tensor, *, samples: int | None = None) -> int:
    """A checksum of the bits of a dense tensor, or of at most `samples` evenly spread elements."""
    flat = tensor.detach()
    if flat.numel() == 0 or flat.is_meta:
        return 0
    if samples is not None:
        # evenly spread over the memory of a dense tensor, whatever the order of its dims
        count, dense = flat.numel(), flat.stride() == torch.empty_like(flat, device="meta").stride()
        flat = flat.as_strided((count,), (1,)) if dense else flat.reshape(-1)
        flat = flat[:: max(1, count // samples)][:samples].clone()
    words = flat.contiguous().reshape(-1).view(_WORDS[flat.element_size()])
    head = words[:4096].to(torch.int64)
    # the sum depends on every bit; the head is weighted by position, because the sum does not depend on the order
    weighted = (head * torch.arange(1, len(head) + 1, device=head.device)).sum()
    total = sum((part.to(torch.int64).sum() for part in words.split(_CHUNK)), torch.zeros_like(weighted))
    return int((total * 1000003 + weighted).item()) & _MASK
