"""Decides which outputs of a model are additive over microbatches. Only then can 1F1B start a backward before the last forward.

The code between units is traced twice, on a microbatch and on the batch (see trace/rows/tracer.py). If no rule proves that the loss
is additive, the code after the units runs once on the whole batch (see runtime.full_batch_tail).
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.devices import HOST
from meshwright_pipeline._torch import hooks_of, pre_hooks_of
from meshwright_pipeline.hook_code import code_of
from meshwright_pipeline.pytrees import differing_dims, full_value, leaves_of
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.loss_denominators import Place
from meshwright_pipeline.trace.microbatch import Call, microbatches, rows_of
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.rows.provenance import rows_without
from meshwright_pipeline.trace.rows.tracer import BatchSizeDependent, ReadsValues, RowTracer, sketch

Tensor = torch.Tensor

_REPEATS = ("expand", "expand_as")
"""Functions that code may skip for a single row. Constants are compared where they are used."""


@dataclass(frozen=True)
class Leaf:
    """How an output leaf of the batch follows from those of `count` microbatches.

    Attributes:
        rows: the dim along which they are concatenated.
        power: the leaf is count ** (power - 1) times their sum: 0 for means, 1 for sums.

    With neither, it is the same in all microbatches.
    """

    rows: int | None = None
    power: int | None = None

    def weight(self, count: int) -> float:
        """The factor of a number of one microbatch."""
        return 1.0 if self.power is None else float(count) ** (self.power - 1)

    def join(self, parts: Sequence[Any]) -> Any:
        """The leaf for the whole batch."""
        if self.rows is not None:
            return torch.cat(list(parts), self.rows)
        if self.power is None or len(parts) == 1:
            return parts[-1]
        return (sum(parts) * self.weight(len(parts))).to(parts[0].dtype)


def join_leaves(joins: Sequence[Leaf | None], parts: Sequence[Sequence[Any]]) -> list[Any]:
    """The proven leaves for the whole batch, from those of microbatches; [] where there are other leaves than expected."""
    if any(len(part) != len(joins) for part in parts):
        return []
    differentiable = [isinstance(leaf, Tensor) and leaf.requires_grad for leaf in parts[0]]
    with torch.no_grad():
        columns = zip(*([full_value(leaf) for leaf in part] for part in parts), strict=True)
        leaves = [join.join(column) for join, column in zip(joins, columns, strict=True) if join is not None]
    return [
        leaf.detach().requires_grad_() if has and isinstance(leaf, Tensor) else leaf
        for leaf, has in zip(leaves, differentiable, strict=True)
    ]


@dataclass(frozen=True)
class Additivity:
    """The proof that a loss is additive over microbatches.

    Attributes:
        loss: how the loss follows from those of microbatches.
        leaves: the same for each output leaf; None if it is not proven.
        averaging: number of losses that average over targets.
        fixed: places of the numbers that only inputs determine.
    """

    loss: Leaf
    leaves: tuple[Leaf | None, ...]
    averaging: int = 0
    fixed: tuple[Place, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether it is proven for all leaves."""
        return None not in self.leaves


@dataclass(frozen=True)
class Reason:
    """Why a loss is not proven additive. `hook`: the forward hook that prevents the proof; `reads`: whether it reads values."""

    text: str
    hook: str = ""
    reads: bool = False

    def __str__(self) -> str:
        return self.text


NO_LOSS = Reason("the model returns no loss, so it is computed outside")
INPUT_GRADIENT = Reason(
    "an input of the model requires a gradient, which is complete only at the end of the step"
)
ROWS_LEFT = Reason("the microbatches cannot share the rows of this batch equally")
OUTPUTS_UNPROVEN = Reason('other outputs, which pipeline.outputs "all" asks for, are not proven additive')


def prove_additive(profiler: Profiler, profile: Profile, batch: Call, count: int) -> Additivity | Reason:
    """Prove how the loss of a batch, whose rows can be divided equally, follows from those of its `count` (> 1) microbatches.

    `profiler`: of the skeleton; `profile`: of the batch.

    Returns: the proof, or why there is none.
    """
    try:
        part, rows = microbatches(*batch, count)[0], rows_of(*batch)
        assert rows is not None
        first = RowTracer(rows // count, profile)
        few = profiler.run(*part, tracer=first)
        second = RowTracer(rows, few, first)
        last = profiler.run(*batch, tracer=second)
    except Exception as error:
        # the model may fail with another number of rows
        return _reason(profiler, error)
    loss = loss_of(last.output)
    befores, leaves = leaves_of(few.output), leaves_of(last.output)
    calls = [[name for name in watch.calls if name not in _REPEATS] for watch in (first, second)]
    same = len(first.tape) == len(second.tape) and calls[0] == calls[1]
    if loss is None or not same or len(befores) != len(leaves):
        return Reason("with another number of rows the model does something else")
    of_loss = _leaf(loss, loss_of(few.output), second)
    if of_loss is None or of_loss.rows is not None:
        return Reason("no rule proves that it consists of sums or means over rows")
    # the same in all microbatches, so it is their mean
    if of_loss.power is None:
        of_loss = Leaf(power=0)
    results = tuple(_leaf(leaf, before, second) for leaf, before in zip(leaves, befores, strict=True))
    return Additivity(of_loss, results, second.averaging, tuple(second.fixed))


def _reason(profiler: Profiler, error: Exception) -> Reason:
    """Why there is no proof when a trace raises an error."""
    text = " ".join(str(error).split())
    if not isinstance(error, BatchSizeDependent):
        text = f"with its units skipped it raises {type(error).__name__}: {text[:200]}"
    hook = _hook_in(profiler.model, error)
    if not hook:
        return Reason(text)
    reads = isinstance(error, ReadsValues)
    text = "reads values" if reads else f"prevents the proof: {text}"
    return Reason(f"forward {hook} {text}", hook, reads)


def _hook_in(model: nn.Module, error: BaseException) -> str:
    """The hook of a module of `model` that was running when `error` was raised, in words; "" if none was."""
    codes = {
        code: f"{kind} {getattr(hook, '__name__', type(hook).__name__)!r} of module {name!r}"
        for name, module in model.named_modules()
        for kind, hooks in (("hook", hooks_of(module)), ("pre-hook", pre_hooks_of(module)))
        for hook in hooks.values()
        if (code := code_of(hook)) is not None
    }
    running = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((codes[code] for code in running if code in codes), "")


def _leaf(leaf: Any, before: Any, tracer: RowTracer) -> Leaf | None:
    """How an output leaf follows from those of microbatches; None if that is not proven."""
    if not isinstance(leaf, Tensor) or not isinstance(before, Tensor):
        return Leaf() if type(leaf) is type(before) and sketch(leaf) == sketch(before) else None
    provenance = tracer.provenance(leaf)
    if provenance is None:
        return Leaf() if sketch(leaf) == sketch(before) else None
    if provenance.rows is None:
        if provenance.power is None or leaf.dim():
            return None
        return Leaf(power=provenance.power) if provenance.live else Leaf()
    row_dims = differing_dims(leaf, before)
    if len(row_dims) != 1:
        return None
    rows = rows_without(provenance.rows, [dim for dim in range(leaf.dim()) if dim != row_dims[0]])
    order = torch.arange(tracer.rows, device=HOST).repeat_interleave(leaf.shape[row_dims[0]] // tracer.rows)
    return Leaf(rows=row_dims[0]) if rows is not None and torch.equal(rows.flatten().long(), order) else None
