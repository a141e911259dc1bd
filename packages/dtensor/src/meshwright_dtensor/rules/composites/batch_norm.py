"""torch.nn.functional.batch_norm with the statistics of the whole batch, whatever its layout."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
import torch.nn.functional as F

from meshwright_dtensor._torch.core import memory_format_of
from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, finish
from meshwright_dtensor.sharding.states import R


class BatchNorm(Composite):
    """x [n, c, ...], running mean, running variance, weight, bias [c] -> like x.

    In training, per-channel sums are all-reduced where the batch (or a spatial dim) is sharded, forward and backward, and
    running statistics are updated in place, alike on every rank.
    """

    name: ClassVar[str] = "batch_norm"
    functions: ClassVar[tuple[Any, ...]] = (F.batch_norm,)
    comm_backward: ClassVar[float] = 0.5

    @from_call
    def normalise(
        self,
        input: Any,
        running_mean: Any,
        running_var: Any,
        weight: Any = None,
        bias: Any = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Bound | None:
        """(x, running_mean, running_var, weight, bias, training, momentum, eps)."""
        whole = input.dim() >= 2 and (running_mean is None) == (running_var is None)
        if not whole or not (training or running_mean is not None):
            return None
        return (input, running_mean, running_var, weight, bias, training, momentum, eps), {}

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Every dim; channels only where no running statistics are to be updated in place."""
        _, running, _, _, _, training, _, _ = view.node.args
        rest = len(view.node.ins) - 1
        rows: list[Row] = []
        for dim in range(len(view.in_shapes[0])):
            if dim != 1:
                rows.append(((dim, *(R,) * rest), (dim,)))
            elif not training or running is None:
                rows.append(((1, *(0,) * rest), (1,)))
        return finish(view, rows, "hand")

    def plain(self, ctx: LocalContext) -> bool:
        """In inference, and where every rank sees the whole batch."""
        return not ctx.node.args[5] or not ctx.axes_sharding_others(0, 1)

    def extra_comm_bytes(self, view: NodeView, strategy: Strategy) -> float:
        """Two sums per channel each way."""
        state = strategy.ins[0]
        if not view.node.args[5] or not isinstance(state, int) or int(state) == 1:
            return 0.0
        return 4.0 * 4 * view.in_shapes[0][1]

    def local(self, ctx: LocalContext) -> LocalFunction:
        """The function itself, or the same in steps with sums over ranks."""
        mean_ref, training, momentum, eps = ctx.node.args[1], *ctx.node.args[5:]
        given = [value is not None for value in ctx.node.args[1:5]]
        if self.plain(ctx):

            def normalise(tensors: list[torch.Tensor]) -> torch.Tensor:
                mean, var, weight, bias = _optional(tensors, given)
                return F.batch_norm(tensors[0], mean, var, weight, bias, training, momentum, eps)

            return normalise
        axes = ctx.axes_sharding_others(0, 1)
        shape = ctx.in_shapes[0]
        count = math.prod(shape) // shape[1]

        def normalise_together(tensors: list[torch.Tensor]) -> torch.Tensor:
            x = tensors[0]
            running_mean, running_var, weight, bias = _optional(tensors, given)
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            dims = [d for d in range(x.dim()) if d != 1]
            across = [1, -1] + [1] * (x.dim() - 2)
            mean = SumOverRanks.apply(x.sum(dims, dtype=wide), axes, ctx) / count
            centred = x.to(wide) - mean.view(across)
            var = SumOverRanks.apply(centred.square().sum(dims), axes, ctx) / count
            if mean_ref is not None:
                with torch.no_grad():
                    running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
                    running_var.mul_(1 - momentum).add_(var, alpha=momentum * count / (count - 1))
            result = centred * (var + eps).rsqrt().view(across)
            if weight is not None:
                result = result * weight.view(across)
            if bias is not None:
                result = result + bias.view(across)
            # the memory order of torch's kernel: dropout draws in memory order
            return result.to(x.dtype).contiguous(memory_format=memory_format_of(x))

        return normalise_together


class SumOverRanks(torch.autograd.Function):
    """Sum over the ranks of some axes, used by each for its own part: all-reduce forward, all-reduce backward."""

    @staticmethod
    def forward(context: Any, part: torch.Tensor, axes: list[int], ctx: LocalContext) -> torch.Tensor:
        """Any shape."""
        context.axes, context.ctx = axes, ctx
        return ctx.all_reduce(part.clone(memory_format=torch.contiguous_format), axes, "forward")

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """The sum over the ranks, each of which used the value."""
        # create_graph=True: an all-reduce alone is no graph
        if torch.is_grad_enabled():
            return SumOverRanks.apply(gradients[0], context.axes, context.ctx), None, None
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        return context.ctx.all_reduce(total, context.axes, "backward"), None, None


def _optional(tensors: list[torch.Tensor], given: list[bool]) -> list[Any]:
    """The optional tensors after x, None where none was given."""
    rest = iter(tensors[1:])
    return [next(rest) if there else None for there in given]
