"""Cross-entropy of whole rows, summed: the loss as torch computes it, its gradient from one softmax.

Torch's own makes a log-softmax of the size of the logits, and between its two backward kernels a gradient of that size which
is zero but for one value a row; here the logits are kept instead, and nothing of their size is made but the result.


Cross-entropy of whole rows that are spread over ranks: its sum over all of them, and its gradient while they wait for it.

The sum is the one place where a forward over rows makes ranks wait for each other.  The gradient of the logits is the same
whatever the sum, but for a factor, so it is made meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright_dtensor.rules.composites.base import LocalContext

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


class _Made:
    """A gradient that was made before its backward, until it is taken."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value: torch.Tensor | None = value

    def take(self) -> torch.Tensor | None:
        value, self.value = self.value, None
        return value


class Ahead:
    """Whether one call makes its gradient in the forward: not where forwards come before a backward, whose would pile up."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Made] | None = None
        self._late = False

    def __call__(self) -> bool:
        """Asked at each forward."""
        last = None if self._last is None else self._last()
        if last is not None and last.take() is not None:
            self._late = True
        return not self._late

    def keep(self, value: torch.Tensor) -> _Made:
        """What was made, for the backward."""
        made = _Made(value)
        self._last = weakref.ref(made)
        return made


class SharedRowsLoss(torch.autograd.Function):
    """As `RowsLoss`, summed over ranks: (sum, rows that count), each of all ranks. One all-reduce per axis, all in the forward."""

    @staticmethod
    def forward(
        context: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        ignore: int,
        axes: list[int],
        ctx: LocalContext,
        ahead: Ahead | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two scalars, of the logits' dtype. `axes`: of the mesh, which share the rows; `ahead`: None where no backward follows."""
        context.save_for_backward(logits, target)
        context.ignore, context.axes, context.ctx, context.made = ignore, axes, ctx, None
        total = summed(logits, target, ignore)
        pair = torch.stack([total, counted(target, ignore).to(total.dtype)])
        for number, axis in enumerate(axes):
            work = dist.all_reduce(pair, group=ctx.group(axis), async_op=True)
            ctx.record("all_reduce", axis, pair.nbytes, "forward")
            if not number and ahead is not None and ahead():
                context.made = ahead.keep(unscaled(logits, target, ignore))
            if work is not None:
                work.wait()
        total, count = (one.clone() for one in pair.unbind())
        context.mark_non_differentiable(count)
        return total, count

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """This rank's part of the logits' gradient; can be differentiated again."""
        gradient = gradients[0]
        logits, target = context.saved_tensors
        if gradient.requires_grad and torch.is_grad_enabled():  # create_graph=True
            gradient = SharedGradient.apply(gradient, context.axes, context.ctx)
        made = None if context.made is None else context.made.take()
        return scaled(gradient, logits, target, context.ignore, made), None, None, None, None, None


class SharedGradient(torch.autograd.Function):
    """A replicated value that every rank uses for its own part: nothing forward, all-reduce backward."""

    @staticmethod
    def forward(context: Any, value: torch.Tensor, axes: list[int], ctx: LocalContext) -> torch.Tensor:
        """Any shape."""
        context.axes, context.ctx = axes, ctx
        return value.detach()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """The sum over the ranks."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        for axis in context.axes:
            dist.all_reduce(total, group=context.ctx.group(axis))
            context.ctx.record("all_reduce", axis, total.nbytes, "backward")
        return total, None, None
