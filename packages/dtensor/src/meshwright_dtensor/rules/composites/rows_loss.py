"""Cross-entropy of whole rows, summed: the loss as torch computes it, its gradient from one softmax.

Between its two kernels torch's own backward passes a gradient of the size of the logits that is zero but for one value a
row; here the logits are kept instead of their log-softmax, and nothing of their size is made but the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F


class RowsLoss(torch.autograd.Function):
    """logits [n, c] in float32 or wider, target [n] of classes -> their summed loss, without the rows to be ignored."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
        """A scalar, to the bit that of torch."""
        context.save_for_backward(logits, target)
        context.ignore = ignore
        return F.cross_entropy(logits, target, ignore_index=ignore, reduction="sum")

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Softmax minus one-hot, times the gradient; can be differentiated again."""
        logits, target = context.saved_tensors
        target = target.long()  # bytes hold no -100
        kept = target != context.ignore
        index = target.masked_fill(~kept, 0).unsqueeze(-1)
        scale = (gradients[0] * kept).unsqueeze(-1)
        result = torch.softmax(logits, -1)
        ones = torch.full_like(scale, -1.0)
        if torch.is_grad_enabled():  # create_graph=True
            return result.scatter_add(-1, index, ones) * scale, None, None
        return result.scatter_add_(-1, index, ones).mul_(scale), None, None
