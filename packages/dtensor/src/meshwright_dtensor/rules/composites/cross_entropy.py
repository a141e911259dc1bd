"""torch.nn.functional.cross_entropy with sharded rows, classes or both; a mean is the exact sum over the exact count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F

from meshwright_dtensor.devices import on_host
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.rules.composites import cross_entropy_rows as whole_rows
from meshwright_dtensor.rules.composites.base import Bound, Composite, LocalContext, LocalFunction, from_call
from meshwright_dtensor.rules.node import NodeView, Row, Strategy, finish, numel
from meshwright_dtensor.sharding.states import P, R, State


class CrossEntropy(Composite):
    """logits [n, c, ...] or [c], target [n, ...] of classes (or of probabilities, like logits) -> loss.

    With rows sharded, a sum or the separate losses need no communication; a mean all-reduces one (sum, weight) pair and
    is complete everywhere.  With classes sharded, each row's maximum, normaliser and target logit are all-reduced.
    """

    name: ClassVar[str] = "cross_entropy"
    functions: ClassVar[tuple[Any, ...]] = (F.cross_entropy,)

    @from_call
    def normalise(
        self,
        input: Any,
        target: Any,
        weight: Any = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        reduce: bool | None = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Bound | None:
        """(logits, target, weight, ignore_index, reduction, label_smoothing); deprecated reductions are not handled."""
        if size_average is not None or reduce is not None or reduction not in ("mean", "sum", "none"):
            return None
        if input.dim() == 0 or not input.is_floating_point():
            return None
        return (input, target, weight, ignore_index, reduction, label_smoothing), {}

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Rows (batch and trailing dims); classes, for class targets without weights and label smoothing."""
        _, _, weight, _, reduction, smoothing = view.node.args
        logits, target = view.in_shapes[:2]
        classes = _class_dim(logits)
        probabilities = not _is_integer(view.dtype(view.node.ins[1]))
        rest: tuple[State, ...] = (R,) if weight is not None else ()
        rows: list[Row] = []
        for dim in range(len(logits)):
            if dim == classes or (target == logits) != probabilities:
                continue
            lost = dim - (dim > classes)
            out: State = R if reduction == "mean" else P if reduction == "sum" else lost
            rows.append(((dim, dim if probabilities else lost, *rest), (out,)))
        if not probabilities and weight is None and smoothing == 0.0:
            rows.append(((classes, R), (R,)))
        return [replace(row, complete=row.ins[0] != R) for row in finish(view, rows, "hand")]

    def permutes(self, view: NodeView, row: Strategy) -> bool:
        """Not for sharded classes: a target is looked up by the offset of one chunk."""
        return row.ins[0] != _class_dim(view.in_shapes[0])

    def plain(self, ctx: LocalContext) -> bool:
        """If classes are not sharded and there is no mean, or torch's own mean is as good."""
        classes = _class_dim(ctx.in_shapes[0])
        own_mean = ctx.node.args[4] != "mean" or not (ctx.axes_sharding_others(0, classes) or _of_rows(ctx))
        return own_mean and not ctx.axes_sharding(0, classes)

    def extra_comm_bytes(self, view: NodeView, strategy: Strategy) -> float:
        """8 bytes for a mean over sharded rows; 12 bytes a row for sharded classes."""
        state = strategy.ins[0]
        if not isinstance(state, int):
            return 0.0
        if state == _class_dim(view.in_shapes[0]):
            return 12.0 * numel(view.in_shapes[1])
        return 8.0 if view.node.args[4] == "mean" else 0.0

    def local(self, ctx: LocalContext) -> LocalFunction:
        """Local losses, then the sums over ranks."""
        loss = _Loss(ctx)
        if loss.reduction != "mean":
            return lambda tensors: loss.losses(tensors, loss.reduction).to(tensors[0].dtype)
        return loss.mean


class _Loss:
    """The local form of one cross-entropy call."""

    def __init__(self, ctx: LocalContext) -> None:
        _, _, self.weight, self.ignore, self.reduction, self.smoothing = ctx.node.args
        self.ctx, self.class_dim = ctx, _class_dim(ctx.in_shapes[0])
        class_axes = ctx.axes_sharding(0, self.class_dim)
        start, length = ctx.region(ctx.in_shapes[0], ctx.ins[0])[self.class_dim][0]
        self.shards = Shards(start, length, ctx.in_shapes[0][self.class_dim], tuple(class_axes), ctx)
        self.row_axes = ctx.axes_sharding_others(0, self.class_dim)
        self.whole_rows = not class_axes and _of_rows(ctx)
        self.early = whole_rows.EarlyGradient()

    def losses(self, tensors: list[torch.Tensor], reduction: str) -> torch.Tensor:
        """The loss of the local rows."""
        logits, target = tensors[:2]
        if self.whole_rows and reduction == "sum" and _by_rows(logits, target):
            total: torch.Tensor = whole_rows.RowsLoss.apply(logits, target, self.ignore)
            return total
        if not self.shards.axes:
            weight = None if self.weight is None else tensors[2]
            ignore, smoothing = self.ignore, self.smoothing
            return F.cross_entropy(
                logits, target, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smoothing
            )
        each: torch.Tensor = VocabularyLoss.apply(logits, target, self.ignore, self.class_dim, self.shards)
        return each if reduction == "none" else each.sum()

    def mean(self, tensors: list[torch.Tensor]) -> torch.Tensor:
        """The mean over the rows of all ranks."""
        logits, target = tensors[:2]
        if self.row_axes and self.whole_rows and whole_rows.takes(logits, target):
            trained = torch.is_grad_enabled() and logits.requires_grad
            total, count = whole_rows.SharedRowsLoss.apply(  # type: ignore[misc]
                logits, target, self.ignore, self.row_axes, self.ctx, self.early if trained else None
            )
            return total / count
        wide = logits.dtype.itemsize >= 4
        local = not (self.row_axes or self.shards.axes)
        if local and not (wide and _is_integer(target.dtype) and _by_rows(logits, target)):
            return self.losses(tensors, "mean")
        # low-precision losses are summed in float32, as torch does inside its kernel
        total = self.losses(tensors, "sum") if wide else self.losses(tensors, "none").float().sum()
        with torch.no_grad():
            count = _weight_of_rows(tensors, self.ignore, self.class_dim).to(total.dtype)
        if self.row_axes:
            total, count = SumPair.apply(total, count, self.row_axes, self.ctx)  # type: ignore[misc]
        return (total / count).to(logits.dtype)


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
        if on_host(target.device) and bool(((target < 0) | (target >= shards.classes))[kept].any()):
            text = f"a target is outside of the {shards.classes} classes; use ignore_index for rows that do not count"
            raise IndexError(text)
        peak = shards.reduce(scores.amax(-1), dist.ReduceOp.MAX)
        here = kept & (target >= shards.start) & (target < shards.start + shards.length)
        index = (target - shards.start).masked_fill(~here, 0).unsqueeze(-1)
        target_scores = (scores.gather(-1, index).squeeze(-1) - peak).masked_fill(~here, 0.0)
        total = (scores - peak.unsqueeze(-1)).exp_().sum(-1)
        sums = shards.reduce(torch.stack([total, target_scores]), dist.ReduceOp.SUM)
        log_total = sums[0].log()
        context.save_for_backward(logits, peak + log_total, index, here, kept)
        context.class_dim = class_dim
        return (log_total - sums[1]).masked_fill(~kept, 0.0)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        """Gradient of this rank's logits: softmax minus one-hot, times the gradient of each row."""
        logits, log_sum, index, here, kept = context.saved_tensors
        with torch.no_grad():
            scores = _wide(logits).movedim(context.class_dim, -1)
            result = (scores - log_sum.unsqueeze(-1)).exp_()
            result.scatter_add_(-1, index, -here.to(result.dtype).unsqueeze(-1))
            result.mul_(gradient.masked_fill(~kept, 0.0).unsqueeze(-1))
            result = result.movedim(-1, context.class_dim).to(logits.dtype)
        # create_graph=True; the softmax above is outside of the graph
        if torch.is_grad_enabled():
            result = Once.apply(result.requires_grad_())
        return result, None, None, None, None


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


class SumPair(torch.autograd.Function):
    """(sum, count) of all ranks on the given axes: one all-reduce forward; backward the gradient as it is."""

    @staticmethod
    def forward(
        context: Any, total: torch.Tensor, count: torch.Tensor, axes: list[int], ctx: LocalContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Two scalars in, two scalars out."""
        context.axes, context.ctx = axes, ctx
        pair = torch.stack([total.detach(), count])
        summed, weight = ctx.all_reduce(pair, axes, "forward").unbind()
        summed, weight = summed.clone(), weight.clone()
        context.mark_non_differentiable(weight)
        return summed, weight

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        """Identity."""
        gradient = gradients[0]
        # create_graph=True
        if gradient.requires_grad and torch.is_grad_enabled():
            gradient = whole_rows.SharedGradient.apply(gradient, context.axes, context.ctx)
        return gradient, None, None, None


def _by_rows(logits: torch.Tensor, target: torch.Tensor) -> bool:
    """Whether `RowsLoss` handles these, and is better than torch's own loss."""
    return whole_rows.takes(logits, target) and not whole_rows.fit_in_cache(logits)


def _is_integer(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def _class_dim(logits: tuple[int, ...]) -> int:
    return 1 if len(logits) > 1 else 0


def _of_rows(ctx: LocalContext) -> bool:
    """Whether the logits are [n, c], without weights and label smoothing."""
    return len(ctx.in_shapes[0]) == 2 and ctx.node.args[2] is None and ctx.node.args[5] == 0.0


def _weight_of_rows(tensors: list[torch.Tensor], ignore: int, class_dim: int) -> torch.Tensor:
    """The divisor of a mean: the number of rows that are not ignored, each weighted by its class."""
    logits, target = tensors[:2]
    if not _is_integer(target.dtype):
        return torch.full((), logits.numel() // logits.shape[class_dim], device=logits.device)
    # uint8 has no -100, and torch counts 156
    kept = target.long() != ignore
    if len(tensors) < 3:
        return kept.sum()
    return tensors[2][target.long().masked_fill(~kept, 0)].masked_fill(~kept, 0).sum()


def _wide(logits: torch.Tensor) -> torch.Tensor:
    return logits if logits.dtype is torch.float64 else logits.float()
