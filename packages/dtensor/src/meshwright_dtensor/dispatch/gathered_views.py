"""Gathered values, and views of them: a view is made with the call that took it, so that a write reaches the base."""

from __future__ import annotations

from collections.abc import Callable
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


class ViewWrite:
    """The program of an in-place function on a gathered view: the base is gathered, written to through the view, and cut."""

    __slots__ = ("func",)

    def __init__(self, func: Function) -> None:
        self.func = func

    def run(self, args: Args, kwargs: Kwargs, site: Site) -> Any:
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
        base, layout = view._origin.base, view._origin.base._layout
        refuse_write_to_copy(base._local)
        rest, full_kwargs = pytree.tree_map(lambda x: whole(x, site), (args[1:], kwargs))
        changed = whole(base, site).clone()
        part = view._origin.take(changed)
        result = self.func(part, *rest, **full_kwargs)
        replicated = layout.context.replicated
        base._local.copy_(local_in(wrap(changed, layout.with_states(replicated)), layout.states, site))
        target = view
        while target is not None:
            value = part if target is view else target._origin.take(changed)
            states = target._layout.with_states(replicated)
            target._local, target._memo = local_in(wrap(value, states), target._layout.states, site), None
            target._base_version = version_of(target._base_tensor)
            target = target._origin.parent
        return view if result is not None else None
