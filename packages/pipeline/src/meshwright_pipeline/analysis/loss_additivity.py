"""Which forward hook an error came out of: a hook that reads values costs a pipeline its schedule, and users should know which.

Which numbers of a model's result follow from those of microbatches, so that backwards may begin before all forwards have ended.

The code between units is watched twice, on a microbatch and on the batch (see watching). What a rule proves adds up;
for all else the code behind the units runs once on the whole batch (see tail).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from meshwright_pipeline._torch import hooks_of, pre_hooks_of
from meshwright_pipeline.pytrees import differing_dims, leaves_of
from meshwright_pipeline.trace.loss import loss_of
from meshwright_pipeline.trace.loss_denominators import Place
from meshwright_pipeline.trace.microbatch import Call, microbatches, rows_of
from meshwright_pipeline.trace.profile import Profile
from meshwright_pipeline.trace.profiler import Profiler
from meshwright_pipeline.trace.row_provenance import rows_without
from meshwright_pipeline.trace.row_tracer import BatchSizeDependent, ReadsValues, RowTracer, sketch


def hook_in(model: nn.Module, error: BaseException) -> str:
    """The hook of a module of `model` that was running when `error` was raised, in words; "" where none was."""
    codes = {
        code: f"{kind} {getattr(hook, '__name__', type(hook).__name__)!r} of module {name!r}"
        for name, module in model.named_modules()
        for kind, hooks in (("hook", hooks_of(module)), ("pre-hook", pre_hooks_of(module)))
        for hook in hooks.values()
        if (code := _code(hook)) is not None
    }
    return next((codes[code] for code in _running(error) if code in codes), "") if codes else ""


def _running(error: BaseException) -> Iterator[CodeType]:
    at = error.__traceback__
    while at is not None:
        yield at.tb_frame.f_code
        at = at.tb_next


def _code(hook: Callable[..., Any]) -> CodeType | None:
    """What a hook runs: that of a function, a method, a partial of one, or of an object that can be called."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    for one in (hook, inspect.getattr_static(type(hook), "__call__", None)):
        found = getattr(one, "__code__", None) or getattr(getattr(one, "__func__", None), "__code__", None)
        if isinstance(found, CodeType):
            return found
    return None


Tensor = torch.Tensor

_REPEATS = ("expand", "expand_as")
"""Functions that code may leave out for a single row: what constants are is compared where something is made of them."""


@dataclass(frozen=True)
class Leaf:
    """How one leaf of a result follows from those of `count` microbatches.

    Attributes:
        rows: the dim along which they lie one after the other.
        power: it is count ** (power - 1) times their sum: 0 for means, 1 for sums.

    With neither, it is the same in all.
    """

    rows: int | None = None
    power: int | None = None

    def weight(self, count: int) -> float:
        """What a number of one microbatch counts."""
        return 1.0 if self.power is None else float(count) ** (self.power - 1)

    def join(self, parts: Sequence[Any]) -> Any:
        """The leaf for the whole batch."""
        if self.rows is not None:
            return torch.cat(list(parts), self.rows)
        if self.power is None or len(parts) == 1:
            return parts[-1]
        return (sum(parts) * self.weight(len(parts))).to(parts[0].dtype)


@dataclass(frozen=True)
class Additivity:
    """A result that adds up.

    Attributes:
        loss: how the loss does.
        leaves: how each leaf does; None for one of which that is not proven.
        averaging: how many losses average over targets that count.
        fixed: where numbers that inputs alone decide are asked for.
    """

    loss: Leaf
    leaves: tuple[Leaf | None, ...]
    averaging: int = 0
    fixed: tuple[Place, ...] = ()

    @property
    def whole(self) -> bool:
        """Whether every leaf is known."""
        return None not in self.leaves


@dataclass(frozen=True)
class Reason:
    """Why a loss is not proven to add up.

    Attributes:
        text: that.
        hook: the forward hook, in words, that is to blame; "" where none is.
        reads: whether it reads values.
    """

    text: str
    hook: str = ""
    reads: bool = False

    def __str__(self) -> str:
        return self.text


NO_LOSS = Reason("the model returns no loss, so that it is made outside")
INPUT_GRADIENT = Reason("a gradient of what the model is given is asked for, which is known at its end")
OUTPUTS_UNPROVEN = Reason('what is returned beside it, with pipeline.outputs "all", is not proven to')


class NotAdditive(Exception):
    """A loss is not proven to add up."""

    def __init__(self, why: Reason) -> None:
        super().__init__(why.text)
        self.why = why


def single_microbatch(result: Any) -> Additivity:
    """Where there is one microbatch."""
    return Additivity(Leaf(), tuple(Leaf() for _ in leaves_of(result)))


def prove_additive(profiler: Profiler, entire: Profile, whole: Call, count: int) -> Additivity:
    """How the loss of a batch follows from those of its microbatches.

    Args:
        profiler: of the skeleton.
        entire: what it has found of the batch.
        whole: the batch, with ordinary tensors; its rows can be shared by the microbatches.
        count: of microbatches, two at least.

    Raises:
        Unproven: that is not proven.
    """
    try:
        part, rows = microbatches(*whole, count)[0], rows_of(*whole)
        assert rows is not None  # else it would not have been cut
        first = RowTracer(rows // count, entire)
        few = profiler.run(*part, tracer=first)
        second = RowTracer(rows, few, first)
        last = profiler.run(*whole, tracer=second)
    except Exception as error:  # whatever code does that meets other numbers of rows than it expects
        hook = hook_in(profiler.model, error)
        reads = isinstance(error, ReadsValues)
        text = "reads values" if reads else f"is in the way: {_said(error)}"
        raise NotAdditive(
            Reason(f"forward {hook} {text}", hook, reads) if hook else Reason(_said(error))
        ) from error
    loss = loss_of(last.output)
    befores, leaves = leaves_of(few.output), leaves_of(last.output)
    calls = [[name for name in watch.calls if name not in _REPEATS] for watch in (first, second)]
    same = len(first.tape) == len(second.tape) and calls[0] == calls[1]
    if loss is None or not same or len(befores) != len(leaves):
        raise NotAdditive(Reason("with other numbers of rows the model does something else"))
    of_loss = _leaf(loss, loss_of(few.output), second)
    if of_loss is None or of_loss.rows is not None:
        raise NotAdditive(Reason("it is not seen to be sums or means over rows"))
    if of_loss.power is None:  # the same in all microbatches: their mean
        of_loss = Leaf(power=0)
    found = tuple(_leaf(leaf, before, second) for leaf, before in zip(leaves, befores, strict=True))
    return Additivity(of_loss, found, second.averaging, tuple(second.fixed))


def _said(error: Exception) -> str:
    """An error in a line."""
    text = " ".join(str(error).split())
    return (
        text
        if isinstance(error, BatchSizeDependent)
        else f"with its units skipped it raises {type(error).__name__}: {text[:200]}"
    )


def _leaf(leaf: Any, before: Any, watch: RowTracer) -> Leaf | None:
    if not isinstance(leaf, Tensor) or not isinstance(before, Tensor):
        return Leaf() if type(leaf) is type(before) and sketch(leaf) == sketch(before) else None
    kind = watch.provenance(leaf)
    if kind is None:
        return Leaf() if sketch(leaf) == sketch(before) else None
    if kind.rows is None:
        if kind.power is None or leaf.dim():
            return None
        return Leaf(power=kind.power) if kind.live else Leaf()
    grown = differing_dims(leaf, before)
    if len(grown) != 1:
        return None
    rest = [dim for dim in range(leaf.dim()) if dim != grown[0]]
    rows = rows_without(kind.rows, rest)
    order = torch.arange(watch.rows).repeat_interleave(leaf.shape[grown[0]] // watch.rows)
    return Leaf(rows=grown[0]) if rows is not None and torch.equal(rows.flatten().long(), order) else None
