"""Experts of tokens that stay: every rank runs them on the rows that it has, where rows are divided and experts are not.

A row of the output depends on its own token and on the experts, and on no other row (the probe shows it). So where an axis
divides the rows of a batch (`dp`, `zero`, `cp`) nothing has to be gathered, although routing (sorting, counting, indexing by
expert) mixes rows: the module runs on this rank's rows as if they were all there are. On the axes that are left, such as `tp`,
the rows are a global value of their own, and the module runs there as the plan says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout, layout_of
from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.plan import ExpertsRule
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap
from meshwright_dtensor.trace.module_stack import FRAMES, Frame
from meshwright_parallel.moe.all_to_all import named_anywhere, tied
from meshwright_parallel.moe.local_parameters import Swapped
from meshwright_parallel.moe.routing import named_experts

Tensor = torch.Tensor


@dataclass
class Apart:
    """The forward of a module of experts that every rank has whole, on the axes that divide the rows.

    Args:
        module: the module.
        name: its fully qualified name.
        rule: what kind of experts it holds.
        inner: the forward that it had before.
    """

    module: nn.Module
    name: str
    rule: ExpertsRule
    inner: Callable[..., Any]

    def __post_init__(self) -> None:
        self.__signature__ = inspect.signature(self.inner)
        self._names = list(self.__signature__.parameters)[:3]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module for global tokens [..., H], assignment and weights."""
        bound = self.__signature__.bind(*args, **kwargs)
        given = [bound.arguments.get(name) for name in self._names]
        tensors = [t for t in given if isinstance(t, Tensor)]
        others = [value for name, value in bound.arguments.items() if name not in self._names]
        tokens = given[0]
        if (
            not isinstance(tokens, GlobalTensor)
            or len(tensors) < 3
            or any(isinstance(value, GlobalTensor) for value in others)
        ):
            return self.inner(*args, **kwargs)
        flat: Any = _shaped(tokens, (-1, tokens.shape[-1]) if tokens.ndim != 2 else tokens.shape)
        axes = self._dividing(flat._layout)
        if not axes or any(t.shape[:1] != flat.shape[:1] for t in tensors[1:]):
            return self.inner(*args, **kwargs)
        states: States = flat._layout.states
        rows = tuple(s if i in axes else "I" for i, s in enumerate(states))
        kept = [i for i, n in enumerate(flat._layout.context.sizes) if i not in axes and n > 1]
        values = [self._rows(t, flat._layout, rows, kept) for t in (flat, *tensors[1:])]
        length, width = values[0].shape
        values[0] = _shaped(values[0], (*(1,) * (tokens.ndim - 2), length, width))
        bound.arguments.update(zip(self._names, values, strict=True))
        out = self._run(bound, self._idle(values[1], flat._layout.context, axes), kept)
        if not isinstance(out, Tensor) or out.numel() != length * width:
            what = list(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise UnsupportedError(
                f"experts {self.name!r} returned {what} for tokens of shape {[length, width]}; they were found to give one row "
                "for every row: report the model, or give the plan a batch whose rows the data ranks do not divide"
            )
        out = _shaped(out, (length, width))
        local, left = (out._local, out._layout.states) if isinstance(out, GlobalTensor) else (out, ())
        inside = dict(zip(kept, left, strict=False))
        whole = tuple(s if i in axes else inside.get(i, "I") for i, s in enumerate(states))
        return _shaped(
            wrap(local, layout_of(flat._layout.context, whole, flat.shape, local.dtype)), tokens.shape
        )

    def _dividing(self, layout: Layout) -> frozenset[int]:
        """The axes that divide the rows, and on which the gradients of all parameters are summed later."""
        stored = [
            layout_of_dtensor(p) if isinstance(p, MeshParameter) else None for p in self.module.parameters()
        ]
        found: set[int] = set()
        for axis, state in enumerate(layout.states):
            if not isinstance(state, int) or int(state) != 0:
                continue
            if any(
                own is None or own.context is not layout.context or own.states[axis] != "X" for own in stored
            ):
                break  # what axes further in make of rows that stay together is theirs
            found.add(axis)
        return frozenset(found)

    def _rows(self, t: Tensor, like: Layout, rows: States, kept: Sequence[int]) -> Tensor:
        """This rank's rows of `t`, divided as those of `like`: plain, or a global value on the `kept` axes."""
        tensor = (
            t if isinstance(t, GlobalTensor) else distribute(t, like.context.mesh, like.context.replicated)
        )
        own = tensor._layout.states
        states = tuple(own[axis] if axis in kept else row for axis, row in enumerate(rows))
        local = local_in(tensor, states)
        if not kept:
            return local
        return wrap(local, layout_of(like.context, states, tensor.shape, tensor.dtype).inside(kept))

    def _idle(self, assignment: Tensor, context: MeshContext, axes: Collection[int]) -> list[nn.Module]:
        """The experts of a container that work on other ranks only, which must have a gradient here as they have there."""
        if self.rule.kind != "container" or not torch.is_grad_enabled():
            return []
        own = assignment.full_tensor() if isinstance(assignment, GlobalTensor) else assignment
        here = named_experts(own, self.rule)
        anywhere = named_anywhere(here, context, sorted(axes), self.name)
        numbers = ((anywhere > 0) & (here == 0)).nonzero().flatten().tolist()
        return [self.module.get_submodule(self.rule.children[number]) for number in numbers]

    def _run(self, bound: inspect.BoundArguments, idle: Sequence[nn.Module], kept: Sequence[int]) -> Any:
        """What the module makes of the rows of this rank, every parameter that has a gradient anywhere reached."""

        def value(parameter: MeshParameter) -> Tensor:
            layout = layout_of_dtensor(parameter)
            local = parameter_local(parameter, layout.states)
            return local if not kept else wrap(local, layout.inside(kept))

        swapped = Swapped()
        try:
            every = swapped.swap(self.module, value)
            out = self.inner(*bound.args, **bound.kwargs)
            if self.rule.kind == "container":
                every = [p for child in idle for p in child.parameters()]
            elif not torch.is_grad_enabled() or not isinstance(out, Tensor) or out.requires_grad:
                return out
            return _reaching(out, every) if every else out
        finally:
            swapped.undo()


def _reaching(out: Any, others: Sequence[Tensor]) -> Any:
    """`out`, from which the backward pass reaches `others` too, with zeros."""
    leaves = [t._local if isinstance(t, GlobalTensor) else t for t in others]
    if isinstance(out, GlobalTensor):
        return wrap(tied(out._local, *leaves), out._layout)
    return tied(out, *leaves) if isinstance(out, Tensor) else out


def _shaped(t: Any, shape: Sequence[int]) -> Any:
    """`t` in another shape; no call of the module, so that those that the plan speaks of keep their numbers."""
    if tuple(t.shape) == tuple(shape):
        return t
    FRAMES.stack.append(Frame("", {}))
    try:
        return t.reshape(shape)
    finally:
        FRAMES.stack.pop()
