"""Redistribution of a local tensor between layouts, with its gradient.

A change of state ``a -> b`` on an axis moves the value from ``forward_kind(a)`` to ``forward_kind(b)`` and its
gradient from ``gradient_kind(b)`` back to ``gradient_kind(a)`` (Megatron's f and g, GSPMD types I/R/V/P): ``I -> X``
is the identity forward and an all-reduce backward, ``P -> I`` the reverse, ``0 -> X`` all-gather and reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

import torch

from meshwright_dtensor._torch.core import bind_apply
from meshwright_dtensor._torch.ownership import references, references_of_unshared
from meshwright_dtensor.comm.collectives import Step, refuse_tangent
from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.comm.memory_order import ordered_steps
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of, local_shape_of
from meshwright_dtensor.sharding.states import State, States, format_state, forward_kind, gradient_kind

Tensor = torch.Tensor
_DUAL: Final[dict[State, State]] = {"X": "P", "P": "X"}
"""State of the gradient of a value, seen as a value; the others are their own."""


def route(source: States, target: States) -> list[tuple[int, State, State]]:
    """The order of single-axis changes that leads from ``source`` to ``target``: (axis, from, to) each.

    A dim that several axes shard is nested, outer axis first, so an inner shard of the same dim is lifted before an
    outer one changes and put back afterwards.
    """
    touched = {i for i, (a, b) in enumerate(zip(source, target, strict=True)) if a != b}
    for i in sorted(touched):
        dims = _dims(source[i], target[i])
        touched |= {j for j in range(i + 1, len(source)) if dims & _dims(source[j], target[j])}
    dims_used = [d for i in touched for d in _dims(source[i], target[i])]
    if len(dims_used) == len(set(dims_used)):
        # steps that make the value smaller come first, so that later steps move less
        order = sorted(touched, key=lambda i: (not isinstance(target[i], int), isinstance(source[i], int), i))
        return [(i, source[i], target[i]) for i in order]
    steps: list[tuple[int, State, State]] = []
    middle = {i: "I" if isinstance(target[i], int) else target[i] for i in touched}
    for i in sorted(touched, reverse=True):
        if source[i] == "X" and isinstance(target[i], int):
            middle[i] = "X"
        if source[i] != middle[i]:
            steps.append((i, source[i], middle[i]))
    steps.extend((i, middle[i], target[i]) for i in sorted(touched) if middle[i] != target[i])
    return steps


def _dims(*states: State) -> set[int]:
    return {int(s) for s in states if isinstance(s, int)}


def steps_between(
    context: MeshContext, source: States, target: States, shape: Sequence[int], coords: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], Step, Step]]:
    """The steps of each single-axis change: (shape before the split over the axis, forward, backward)."""
    current = list(source)
    for axis, a, b in route(source, target):
        others = tuple("I" if i == axis else s for i, s in enumerate(current))
        sizes = local_shape_of(shape, context.sizes, coords, others)
        forward, backward = (
            Step(context, axis, *kinds, *(sizes[kind] if isinstance(kind, int) else 0 for kind in kinds))
            for kinds in ((forward_kind(a), forward_kind(b)), (gradient_kind(b), gradient_kind(a)))
        )
        current[axis] = b
        yield sizes, forward, backward


class Conversion:
    """Converts a local tensor from ``source`` to ``target`` states, and its gradient back.

    Attributes:
        moves: whether the forward conversion is a collective.
        keep: whether a converted value is kept for its other readers.
        by_way_of: where a Partial becomes X, the states with I there: all readers share the reduction.
    """

    __slots__ = (
        "context",
        "source",
        "target",
        "shape",
        "_forward",
        "_backward",
        "_overwriting",
        "_ordered",
        "by_way_of",
        "keep",
        "moves",
    )

    def __init__(self, context: MeshContext, source: States, target: States, shape: torch.Size) -> None:
        self.context, self.source, self.target, self.shape = context, source, target, shape
        steps = list(steps_between(context, source, target, shape, context.coords))
        forward = (step.function("forward") for _, step, _ in steps)
        backward = (step.function("backward") for _, _, step in reversed(steps))
        self._forward, self._backward = ([f for f in made if f is not None] for made in (forward, backward))
        alone = len(steps) == 1 and steps[0][2].collective == "all_reduce"
        self._overwriting = steps[0][2].function("backward", overwrites=True) if alone else None
        self._ordered = (
            ordered_steps(context, source, shape, [step for _, step, _ in steps], "forward"),
            ordered_steps(context, target, shape, [step for _, _, step in reversed(steps)], "backward"),
        )
        reduced = tuple("I" if (a, b) == ("P", "X") else a for a, b in zip(source, target, strict=True))
        self.by_way_of = None if reduced == source else reduced
        self.moves = any(step.collective is not None for _, step, _ in steps)
        # an alias costs no memory, and readers share a gathered or reduced value; a slice is cheap
        self.keep = self.moves or not self._forward

    def __repr__(self) -> str:
        return f"{'/'.join(map(format_state, self.source))}->{'/'.join(map(format_state, self.target))}"

    def forward(self, t: Tensor, site: Site) -> Tensor:
        """The converted local value, without autograd; ``t`` itself when nothing changes."""
        if not self._forward:
            return t
        order = None if t.is_contiguous() and 1 not in t.shape else dim_order_of(t)
        ordered = None if self._ordered[0] is None else self._ordered[0].of(t, site)
        for step in ordered or self._forward:
            t = step(t, site)
        if order is None or dim_order_of(t) == order:
            return t
        # a reader may draw random numbers, which one device draws in the order of memory
        return t.new_empty_strided(t.shape, dense_strides(t.shape, order)).copy_(t)

    def backward(self, g: Tensor, site: Site, unshared: bool = False) -> Tensor:
        """The gradient for the source, from that of the converted value, which may be overwritten if it is ``unshared``."""
        ordered = None if self._ordered[1] is None else self._ordered[1].of(g, site)
        if unshared and ordered is None and self._overwriting is not None and g.is_contiguous():
            return self._overwriting(g, site)
        for step in ordered or self._backward:
            g = step(g, site)
        return g

    @property
    def overwrites(self) -> bool:
        """Whether the gradient is reduced in its own memory if nobody else holds it."""
        return self._overwriting is not None

    def dual(self) -> Conversion:
        """The conversion of the gradient in the backward pass, itself differentiable."""
        source, target = (tuple(_DUAL.get(s, s) for s in states) for states in (self.target, self.source))
        conversion = conversion_between(self.context, source, target, self.shape)
        # states that differ have duals that differ
        assert conversion is not None
        return conversion

    def apply(self, t: Tensor, site: Site = NOWHERE) -> Tensor:
        """The converted local value; autograd records it if it records ``t``. Raises UnsupportedError: ``t`` has a tangent."""
        records = t.requires_grad and torch.is_grad_enabled()
        if not self._forward and not (records and self._backward):
            return t
        # it would be lost where t is detached
        refuse_tangent(t)
        return _apply(t, self, site) if records else self.forward(t.detach(), site)


def conversion_between(
    context: MeshContext, source: States, target: States, shape: torch.Size
) -> Conversion | None:
    """Converts a local tensor from ``source`` to ``target`` states; None when they are equal."""
    if source == target:
        return None
    # without a call where it is known: every conversion of every step is looked up here
    conversion = context.cache.get((Conversion, (source, target, shape)))
    return conversion or context.cached(Conversion, source, target, shape)


def convert(local: Tensor, layout: Layout, states: States, site: Site = NOWHERE) -> Tensor:
    """The local tensor of ``layout`` in other states; autograd records it if it records ``local``."""
    conversion = conversion_between(layout.context, layout.states, states, layout.shape)
    return local if conversion is None else conversion.apply(local, site)


class _Convert(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, conversion: Conversion, site: Site) -> Tensor:
        ctx.conversion, ctx.site = conversion, site
        ctx.set_materialize_grads(False)
        # detached, because a view that a custom Function returns cannot be modified in place
        return conversion.forward(t.detach(), site)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, None, None]:
        if grad is None:
            return None, None, None
        # create_graph=True: the collectives alone are not differentiable
        if grad.requires_grad and torch.is_grad_enabled():
            return ctx.conversion.dual().apply(grad, ctx.site), None, None
        conversion: Conversion = ctx.conversion
        # on an accelerator a reader on another stream may be late
        plain = conversion.overwrites and type(grad) is Tensor and on_host(grad.device)
        unshared = plain and references(grad) == references_of_unshared()
        return conversion.backward(grad, ctx.site, unshared), None, None


_apply = bind_apply(_Convert)
