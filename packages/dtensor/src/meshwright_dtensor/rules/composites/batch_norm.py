"""torch.nn.functional.batch_norm with the statistics of the whole batch, whatever its layout."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
        shape = ctx.in_shapes[0]
        batch = _Batch(ctx.axes_sharding_others(0, 1), math.prod(shape) // shape[1], eps, ctx)

        def normalise_together(tensors: list[torch.Tensor]) -> torch.Tensor:
            x = tensors[0]
            running_mean, running_var, weight, bias = _optional(tensors, given)
            wide = torch.float64 if x.dtype is torch.float64 else torch.float32
            result, mean, var = NormaliseTogether.apply(
                x,
                x.new_ones(x.shape[1], dtype=wide) if weight is None else weight.to(wide),
                x.new_zeros(x.shape[1], dtype=wide) if bias is None else bias.to(wide),
                batch,
            )
            if mean_ref is not None:
                with torch.no_grad():
                    running_mean.mul_(1 - momentum).add_(mean, alpha=momentum)
                    unbiased = batch.count / (batch.count - 1)
                    running_var.mul_(1 - momentum).add_(var, alpha=momentum * unbiased)
            # the memory order of torch's kernel: dropout draws in memory order
            return result.contiguous(memory_format=memory_format_of(x))

        return normalise_together


@dataclass(frozen=True)
class _Batch:
    """What is normalised together: count values a channel over the ranks of the axes."""

    axes: list[int]
    count: int
    eps: float
    ctx: LocalContext

    def moments(self, x: torch.Tensor, wide: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Mean and biased variance of each channel, and x less its mean. torch.var_mean would take ten times as long on CPU."""
        dims = _all_but_channels(x)
        mean = SumOverRanks.apply(x.sum(dims, dtype=wide), self.axes, self.ctx) / self.count
        centred = x.to(wide) - _across(mean, x)
        var = SumOverRanks.apply(centred.square().sum(dims), self.axes, self.ctx) / self.count
        return mean, var, centred

    def in_steps(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """The result by operations that can be differentiated any number of times."""
        _, var, centred = self.moments(x, weight.dtype)
        result = centred * _across((var + self.eps).rsqrt() * weight, x) + _across(bias, x)
        return result.to(x.dtype)


class NormaliseTogether(torch.autograd.Function):
    """x [n, c, ...], weight, bias [c] -> like x, mean, biased variance [c] of the whole batch.

    Between two all-reduces forward and one backward it runs torch's own kernels, in few passes over x. Gradients as in
    synchronised batch normalisation (Ioffe and Szegedy, 2015, section 3), of weight and bias those of this rank's rows.
    """

    @staticmethod
    def forward(
        context: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, batch: _Batch
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Shapes as above."""
        mean, var = batch.moments(x, weight.dtype)[:2]
        context.batch = batch
        context.save_for_backward(x, weight, bias, mean, var)
        context.mark_non_differentiable(mean, var)
        # a rank without rows takes part in the sums alone
        result = F.batch_norm(x, mean, var, weight, bias, False, 0.0, batch.eps) if x.numel() else x.clone()
        return result, mean, var

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Of x, weight and bias."""
        (x, weight, bias, mean, var), batch, given = context.saved_tensors, context.batch, gradients[0]
        # create_graph=True
        if torch.is_grad_enabled():
            wanted = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
            computed = iter(
                torch.autograd.grad(batch.in_steps(x, weight, bias), wanted, given, create_graph=True)
            )
            return *(next(computed) if tensor.requires_grad else None for tensor in (x, weight, bias)), None
        if x.numel():
            _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(
                given, x, weight, mean, var, None, None, False, batch.eps, [False, True, True]
            )
        else:
            of_weight, of_bias = torch.zeros_like(weight), torch.zeros_like(bias)
        if not context.needs_input_grad[0]:
            return None, of_weight, of_bias, None
        sums = batch.ctx.all_reduce(torch.stack([of_weight, of_bias]), batch.axes, "backward") / batch.count
        inverse = (var + batch.eps).rsqrt()
        slope = weight * inverse * inverse * sums[0]
        offset = weight * inverse * sums[1] - slope * mean
        wide = weight.dtype
        of_x = torch.addcmul(_across(-offset, x), given.to(wide), _across(weight * inverse, x))
        of_x = of_x.addcmul_(x.to(wide), _across(slope, x), value=-1)
        return of_x.to(x.dtype), of_weight, of_bias, None


def _all_but_channels(x: torch.Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def _across(channels: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Values of channels [c] as [1, c, 1, ...], with as many dims as x."""
    return channels.view([1, -1] + [1] * (x.dim() - 2))


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
