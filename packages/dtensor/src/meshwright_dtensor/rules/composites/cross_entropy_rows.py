"""Summed cross-entropy of whole rows, on one rank and over ranks that shard the rows.

The loss is torch's own, to the bit. The backward needs one softmax of the saved logits: torch saves a log-softmax of the size
of the logits, and fills a second gradient of that size with zeros. Over ranks, the gradient of the logits is known up to a
factor before the all-reduce of the sum has ended, so it is computed during the all-reduce.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright_dtensor._torch.functional import is_recorded
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.devices.waits import wait_for
from meshwright_dtensor.rules.composites.base import LocalContext

ON_CPU, ELSEWHERE = 1 << 20, 256 << 20
"""Bytes of log-softmax at a time: on the CPU they fit a core's cache, elsewhere they fill the device."""
LEAST, MOST = 16, 64
"""Fewest rows at a time, and most parts."""


class RowsLoss(torch.autograd.Function):
    """logits [n, c] in float32 or wider, target [n] of classes -> summed loss of the rows that are not ignored; see `takes`."""

    @staticmethod
    def forward(context: Any, logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
        """A scalar, equal to torch's to the bit."""
        context.save_for_backward(logits, target)
        context.ignore = ignore
        return summed(logits, target, ignore)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Softmax minus one-hot, times the gradient; twice differentiable."""
        logits, target = context.saved_tensors
        return scaled(gradients[0], logits, target, context.ignore), None, None


def summed(logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
    """The loss, a scalar; no gradient flows through it."""
    room = _room(logits)
    if logits.nbytes <= room:
        # in one part
        return F.cross_entropy(logits.detach(), target, ignore_index=ignore, reduction="sum")
    kept, index = _looked_up(target, ignore)
    count = max(LEAST, room // (logits[:1].nbytes or 1), len(logits) // MOST)
    logs = torch.empty_like(logits[:count], memory_format=torch.contiguous_format)
    target_logs = logits.new_empty(index.shape)
    for rows, at, each in zip(logits.split(count), index.split(count), target_logs.split(count), strict=True):
        torch.log_softmax(rows, -1, out=logs[: len(rows)])
        try:
            torch.gather(logs[: len(rows)], -1, at, out=each)
        except RuntimeError:
            wrong = at[(at < 0) | (at >= logs.shape[-1])]
            if not wrong.numel():
                raise
            # as torch's own loss
            raise IndexError(f"Target {int(wrong[0])} is out of bounds.") from None
    # as one class: summed by torch's own kernel, in its order
    return F.nll_loss(target_logs, torch.where(kept, 0, -100), ignore_index=-100, reduction="sum")


def unscaled(logits: torch.Tensor, target: torch.Tensor, ignore: int) -> torch.Tensor:
    """Softmax minus one-hot [n, c]: the gradient without its factor, which is 0 in ignored rows."""
    _, index = _looked_up(target, ignore)
    return torch.softmax(logits, -1).scatter_add_(-1, index, _minus_ones(logits))


def scaled(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore: int,
    made: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the logits [n, c] for that of the sum; `made`: result of `unscaled`, which is overwritten."""
    kept, index = _looked_up(target, ignore)
    # not a product, which is NaN for the mean of no rows
    scale = torch.where(kept, gradient, 0.0).unsqueeze(-1)
    # create_graph=True
    if torch.is_grad_enabled():
        return torch.softmax(logits, -1).scatter_add(-1, index, _minus_ones(logits)) * scale
    return (unscaled(logits, target, ignore) if made is None else made).mul_(scale)


def takes(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether `RowsLoss` handles these: logits [n, c] and one class index per row."""
    plain = logits.dim() == 2 and target.shape == logits.shape[:1] and logits.shape[1] > 0
    return plain and logits.dtype.itemsize >= 4 and target.dtype in (torch.int64, torch.uint8)


def fit_in_cache(logits: torch.Tensor) -> bool:
    """Whether torch's own loss is faster: what `RowsLoss` saves of memory is little, and it computes the softmax again."""
    return logits.nbytes <= _room(logits) if on_host(logits.device) else logits.nbytes <= ON_CPU


def _room(logits: torch.Tensor) -> int:
    """Bytes of log-softmax at a time."""
    return ON_CPU * torch.get_num_threads() if on_host(logits.device) else ELSEWHERE


def _minus_ones(logits: torch.Tensor) -> torch.Tensor:
    return logits.new_full((len(logits), 1), -1.0)


def _looked_up(target: torch.Tensor, ignore: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask of the rows that are not ignored [n], and the class of each row [n, 1], 0 if ignored."""
    # uint8 has no -100
    target = target.long()
    kept = target != ignore
    return kept, target.masked_fill(~kept, 0).unsqueeze(-1)


@dataclass(eq=False)
class _Made:
    """A gradient that was computed before its backward."""

    value: torch.Tensor | None

    def take(self) -> torch.Tensor | None:
        value, self.value = self.value, None
        return value


class EarlyGradient:
    """Whether one call computes its gradient in the forward: not if several forwards precede a backward, as each would hold one."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Made] | None = None
        self._late = False

    def __call__(self) -> bool:
        """Called at each forward."""
        last = None if self._last is None else self._last()
        if last is not None and last.take() is not None:
            self._late = True
        return not self._late

    def keep(self, value: torch.Tensor) -> _Made:
        """Keep the gradient for the backward."""
        made = _Made(value)
        self._last = weakref.ref(made)
        return made


class SharedRowsLoss(torch.autograd.Function):
    """As `RowsLoss` over ranks: (sum, number of rows) of all ranks, with one all-reduce per axis in the forward."""

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore: int,
        axes: list[int],
        ctx: LocalContext,
        early: EarlyGradient | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two scalars, of the logits' dtype. `axes`: the mesh axes that shard the rows; `early`: None without a backward."""
        context.save_for_backward(logits, target)
        context.ignore, context.axes, context.ctx, context.made = ignore, axes, ctx, None
        total = summed(logits, target, ignore)
        pair = torch.stack([total, _looked_up(target, ignore)[0].sum().to(total.dtype)])
        for number, axis in enumerate(axes):
            if is_recorded(pair):
                pair = ctx.all_reduce(pair, [axis], "forward")
                continue
            work = dist.all_reduce(pair, group=ctx.group(axis), async_op=True)
            ctx.record("all_reduce", axis, pair.nbytes, "forward")
            if not number and early is not None and early():
                context.made = early.keep(unscaled(logits, target, ignore))
            wait_for(work)
        total, count = (scalar.clone() for scalar in pair.unbind())
        context.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """The gradient of the local logits; twice differentiable."""
        gradient = gradients[0]
        logits, target = context.saved_tensors
        # create_graph=True
        if gradient.requires_grad and torch.is_grad_enabled():
            gradient = SharedGradient.apply(gradient, context.axes, context.ctx)
        made = None if context.made is None else context.made.take()
        return scaled(gradient, logits, target, context.ignore, made), None, None, None, None, None


class SharedGradient(torch.autograd.Function):
    """A replicated value that each rank uses for its local rows: identity forward, all-reduce backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, axes: list[int], ctx: LocalContext) -> torch.Tensor:
        """Any shape."""
        context.axes, context.ctx = axes, ctx
        return value.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """The sum over the ranks."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        return context.ctx.all_reduce(total, context.axes, "backward"), None, None
