"""Cross-entropy of whole rows that are spread over ranks: its sum over all of them, and its gradient while they wait for it.

The sum is the one place where a forward over rows makes ranks wait for each other.  The gradient of the logits is the same
whatever the sum, but for a factor, so it is made meanwhile.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.rules.composite import LocalContext
from meshwright_dtensor.rules.composites.rows_loss import counted, scaled, summed, unscaled


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
