"""Cross-entropy of whole rows, summed: the loss as torch computes it, its gradient from one softmax.

Torch's own makes a log-softmax of the size of the logits, and between its two backward kernels a gradient of that size which
is zero but for one value a row; here the logits are kept instead, and nothing of their size is made but the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

ON_CPU, ELSEWHERE = 1 << 20, 256 << 20
"""Bytes of log-softmax that are there at once: they stay in a core's cache, and accelerators get enough to do."""
LEAST, MOST = 16, 64
"""Rows at once at least, which threads share, and parts at most."""


class RowsLoss(torch.autograd.Function):
    """logits [n, c] in float32 or wider, target [n] of classes -> their summed loss, without the rows to be ignored.

    For what `takes` says; torch's own refuses the rest, or knows it.
    """

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
        """A scalar, to the bit that of torch."""
        context.save_for_backward(logits, target)
        context.ignore = ignore
        return summed(logits, target, ignore)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Softmax minus one-hot, times the gradient; can be differentiated again."""
        logits, target = context.saved_tensors
        return scaled(gradients[0], logits, target, context.ignore), None, None


def summed(logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
    """The loss, a scalar; no gradient flows through it."""
    kept, index = _looked_up(target, ignore)
    room = ON_CPU * torch.get_num_threads() if logits.device.type == "cpu" else ELSEWHERE
    count = max(LEAST, room // (logits[:1].nbytes or 1), len(logits) // MOST)
    logs = torch.empty_like(logits[:count], memory_format=torch.contiguous_format)
    found = logits.new_empty(index.shape)
    for rows, at, each in zip(logits.split(count), index.split(count), found.split(count), strict=True):
        torch.log_softmax(rows, -1, out=logs[: len(rows)])
        try:
            torch.gather(logs[: len(rows)], -1, at, out=each)
        except RuntimeError as error:
            raise _as_of_torch(error, at, logs.shape[-1]) from None
    # of one class: summed by the kernel, and so in the order, of torch's own
    return F.nll_loss(found, torch.where(kept, 0, -100), ignore_index=-100, reduction="sum")


def unscaled(logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
    """Softmax minus one-hot [n, c]: the gradient but for its factor, which is 0 in rows to be ignored."""
    _, index = _looked_up(target, ignore)
    return torch.softmax(logits, -1).scatter_add_(-1, index, _minus_ones(logits))


def scaled(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore: int,
    made: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits [n, c] for that of the sum; `made`: what `unscaled` gives, which is taken for it."""
    kept, index = _looked_up(target, ignore)
    scale = torch.where(kept, gradient, 0.0).unsqueeze(-1)  # no product: of the mean of no rows it is NaN
    if torch.is_grad_enabled():  # create_graph=True
        return torch.softmax(logits, -1).scatter_add(-1, index, _minus_ones(logits)) * scale
    return (unscaled(logits, target, ignore) if made is None else made).mul_(scale)


def counted(target: torch.Tensor, ignore: int) -> torch.Tensor:
    """How many rows are not ignored, a scalar."""
    return _looked_up(target, ignore)[0].sum()


def takes(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether it is for these: numbers of classes as torch has them, one a row."""
    plain = logits.dim() == 2 and target.shape == logits.shape[:1] and logits.shape[1] > 0
    return plain and logits.dtype.itemsize >= 4 and target.dtype in (torch.int64, torch.uint8)


def _minus_ones(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_full((len(logits), 1), -1.0)


def _looked_up(target: torch.Tensor, ignore: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which rows count [n], and the class of each [n, 1], 0 where it does not."""
    target = target.long()  # bytes hold no -100
    kept = target != ignore
    return kept, target.masked_fill(~kept, 0).unsqueeze(-1)


def _as_of_torch(error: RuntimeError, index: torch.Tensor, classes: int) -> Exception:
    """What torch's own loss raises for a class that is not there; any other error as it is."""
    wrong = index[(index < 0) | (index >= classes)]
    return IndexError(f"Target {int(wrong[0])} is out of bounds.") if wrong.numel() else error
