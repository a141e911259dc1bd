"""Cross-entropy with sharded classes (vocab-parallel): no rank holds a whole row of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.rules.composites.base import LocalContext


@dataclass(frozen=True)
class Shards:
    """This rank's classes ``[start, start + length)`` of ``classes``, and the mesh axes that shard them."""

    start: int
    length: int
    classes: int
    axes: tuple[int, ...]
    ctx: LocalContext

    def reduce(self, tensor: torch.Tensor, op: Any) -> torch.Tensor:
        """All-reduce in place over all axes."""
        return self.ctx.all_reduce(tensor, self.axes, "forward", op)


class VocabularyLoss(torch.autograd.Function):
    """logits [n, c / ranks, ...], target [n, ...] -> loss of each row in float32 or wider, 0 where ignored.

    Forward all-reduces the maximum, then (normaliser, target logit) together; backward is local: softmax minus one-hot.
    """

    @staticmethod
    def forward(
        context: Any, logits: torch.Tensor, target: torch.Tensor, ignore: int, class_dim: int, shards: Shards
    ) -> torch.Tensor:
        """Loss of each row, the same on every rank of the axes."""
        scores = _wide(logits).movedim(class_dim, -1)
        # uint8 has no -100
        target = target.long()
        kept = target != ignore
        if target.device.type == "cpu" and bool(((target < 0) | (target >= shards.classes))[kept].any()):
            raise IndexError(
                f"a target is outside of the {shards.classes} classes; use ignore_index for rows that do not count"
            )
        peak = shards.reduce(scores.amax(-1), dist.ReduceOp.MAX)
        here = kept & (target >= shards.start) & (target < shards.start + shards.length)
        index = (target - shards.start).masked_fill(~here, 0).unsqueeze(-1)
        target_scores = (scores.gather(-1, index).squeeze(-1) - peak).masked_fill(~here, 0.0)
        sums = shards.reduce(
            torch.stack([(scores - peak.unsqueeze(-1)).exp_().sum(-1), target_scores]), dist.ReduceOp.SUM
        )
        log_total = sums[0].log()
        context.save_for_backward(logits, peak + log_total, index, here, kept)
        context.class_dim = class_dim
        return (log_total - sums[1]).masked_fill(~kept, 0.0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Gradient of this rank's logits."""
        with torch.no_grad():
            result = VocabularyLoss.gradient(context, gradient)
        # create_graph=True; the softmax below is outside of the graph
        if torch.is_grad_enabled():
            result = Once.apply(result.requires_grad_())
        return result, None, None, None, None

    @staticmethod
    def gradient(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        """Softmax minus one-hot, times the gradient of each row."""
        logits, log_sum, index, here, kept = context.saved_tensors
        scores = _wide(logits).movedim(context.class_dim, -1)
        result = (scores - log_sum.unsqueeze(-1)).exp_()
        result.scatter_add_(-1, index, -here.to(result.dtype).unsqueeze(-1))
        result.mul_(gradient.masked_fill(~kept, 0.0).unsqueeze(-1))
        return result.movedim(-1, context.class_dim).to(logits.dtype)


class Once(torch.autograd.Function):
    """Refuses to be differentiated, instead of giving a second derivative that lacks a term."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor) -> torch.Tensor:
        """The value itself."""
        return value.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Always an error."""
        raise UnsupportedError(
            "a second derivative through cross_entropy over sharded classes is not supported; gather the classes first: "
            "logits.redistribute(...) to a layout in which the class dim is whole"
        )


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
