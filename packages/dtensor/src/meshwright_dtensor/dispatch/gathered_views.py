"""Gathered values, and views of them: a view is made with the call that took it, so that a write reaches the base."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.comm.log import NOWHERE, Site
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.parameter import layout_of_dtensor, parameter_local
from meshwright_dtensor.tensor.compute_copy import refuse_write_to_copy
from meshwright_dtensor.tensor.global_tensor import (
    DetachedView,
    GlobalTensor,
    detached,
    local_in,
    version_of,
    wrap,
)
from meshwright_dtensor.trace.function_kinds import Args, Function, Kwargs
from meshwright_dtensor.trace.graph import function_name

Tensor = torch.Tensor


def whole(x: Any, site: Site = NOWHERE) -> Any:
    """The gathered value of a global tensor or mesh parameter, recorded by autograd; anything else as it is."""
    if isinstance(x, GlobalTensor):
        if isinstance(x, DetachedView):
            x.check_fresh()
        return local_in(x, x._layout.context.replicated, site)
    if isinstance(x, DTensor):
        return parameter_local(x, layout_of_dtensor(x).context.replicated, site)
    return x


Copies = Sequence[tuple[Tensor, Any]]
"""Whole values, each with the parameter that it was gathered from."""
COPIES: ContextVar[Copies] = ContextVar("COPIES", default=())
"""What `source` knows: those that the running Function of the user was given."""


@contextmanager
def standing_for(copies: Copies) -> Iterator[None]:
    """While open, `source` knows these."""
    token = COPIES.set(copies)
    try:
        yield
    finally:
        COPIES.reset(token)


def source(x: Any) -> Any:
    """The parameter that `x` was gathered from, as far as COPIES says; else `x`."""
    if type(x) is Tensor and not x.is_leaf:
        for copy, parameter in COPIES.get():
            if x.grad_fn is copy.grad_fn and x.shape == copy.shape:
                return parameter
    return x


def write_to_whole(target: GlobalTensor, change: Callable[[Tensor], Any], site: Site) -> Any:
    """Let `change` write to the whole value of `target`, and keep this rank's part; returns its result."""
    refuse_write_to_copy(target._local)
    full, layout = whole(target, site), target._layout
    if full is target._local:
        return change(full)
    full = full.clone()
    result = change(full)
    replicated = layout.with_states(layout.context.replicated)
    target._local.copy_(local_in(wrap(full, replicated), layout.states, site))
    return result


@dataclass(slots=True, eq=False)
class Origin:
    """How a view was taken: `take` gives it from the whole value of `base`; `parent`: the view that it is a view of."""

    base: GlobalTensor
    take: Callable[[Tensor], Tensor]
    parent: DetachedView | None


def gathered_view(
    local: Tensor,
    layout: Layout,
    base: Any,
    func: Function,
    args: Args,
    kwargs: Kwargs,
    place: int | None = None,
) -> DetachedView:
    """The view `local` of a gathered `base`: the result of a call, or the tensor at `place` among its results."""
    view = detached(local, layout, base)
    before: Callable[[Tensor], Tensor] | None = None
    root, parent = base, None
    if isinstance(base, DetachedView):
        if base._origin is None:
            return view
        root, before, parent = base._origin.base, base._origin.take, base
    if not isinstance(root, GlobalTensor):
        # parameters have views of their own
        return view

    def take(full: Tensor) -> Tensor:
        value = full if before is None else before(full)
        plain = pytree.tree_map(lambda x: value if x is base else whole(x), (args, kwargs))
        result: Any = func(*plain[0], **plain[1])
        return result if place is None else pytree.tree_leaves(result)[place]  # type: ignore[no-any-return]

    view._origin = Origin(root, take, parent)
    return view


@dataclass(slots=True, eq=False)
class ViewWrite:
    """The program of an in-place function on a gathered view: the base is gathered, written to through the view, and cut."""

    func: Function

    def run(self, args: Args, kwargs: Kwargs, tensors: Sequence[Any], site: Site) -> Any:
        """Write, on every rank (a collective call).

        Raises UnsupportedError: the view is stale, or it is not known how it was taken.
        """
        view = args[0]
        if view._origin is None:
            raise UnsupportedError(
                f"{function_name(self.func)} writes to a view that had to be gathered from its sharded base, and would not reach "
                "the base; write to the base itself (x[index] = value works on sharded tensors) or use the out-of-place form"
            )
        view.check_fresh()
        rest, full_kwargs = pytree.tree_map(lambda x: whole(x, site), (args[1:], kwargs))
        parts: list[tuple[DetachedView, Tensor]] = []

        def change(full: Tensor) -> Any:
            result = self.func(view._origin.take(full), *rest, **full_kwargs)
            target = view
            while target is not None:
                parts.append((target, target._origin.take(full)))
                target = target._origin.parent
            return result

        result = write_to_whole(view._origin.base, change, site)
        # the views that led to this one have changed too
        for target, part in parts:
            replicated = target._layout.with_states(target._layout.context.replicated)
            target._local, target._memo = local_in(wrap(part, replicated), target._layout.states, site), None
            target._base_version = version_of(target._base_tensor)
        return view if result is not None else None
