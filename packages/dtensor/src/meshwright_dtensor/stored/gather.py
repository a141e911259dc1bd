"""Stored DTensors (parameters, gradients, optimizer states) as gathered values and as global tensors, and back.

This is the stored value of a parameter, never its compute copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from meshwright_dtensor._torch.core import dtensor_local, pytree, settled
from meshwright_dtensor.comm.log import Site
from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import follow_call
from meshwright_dtensor.mesh.layout import Layout, stock_layout
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of
from meshwright_dtensor.sharding.states import complete
from meshwright_dtensor.stored.mesh_value import mesh_value
from meshwright_dtensor.stored.permuted import as_permuted, stock_dtensor
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, local_in, wrap
from meshwright_dtensor.trace.function_kinds import Args, Function

Tensor = torch.Tensor

_SITE = Site(function="write")


def stored_layout(x: DTensor) -> Layout:
    """The layout of the stored value."""
    layout = getattr(x, "_layout", None)
    if isinstance(layout, Layout):
        return layout
    return stock_layout(x)


def gather_stored(x: DTensor) -> Tensor:
    """The whole stored value, outside of autograd; the local tensor itself where every rank holds all (a collective call)."""
    layout, local = stored_layout(x), dtensor_local(x).detach()
    return convert(local, layout, layout.context.replicated, _SITE)


def whole_value(x: Any) -> Any:
    """The whole value of a global tensor or stored DTensor, without autograd; anything else as it is.

    Raises UnsupportedError: autograd would have to record its use.
    """
    if not isinstance(x, Tensor):
        return x
    if torch.is_grad_enabled() and x.requires_grad:
        raise UnsupportedError(
            f"a write into a sharded tensor is given a value of shape {list(x.shape)} that requires grad, and autograd would "
            "have to record it; write under torch.no_grad(), or write value.detach()"
        )
    if isinstance(x, GlobalTensor):
        return x.full_tensor().detach()
    if isinstance(x, DTensor):
        return gather_stored(_current(x))
    return x


def _current(x: DTensor) -> DTensor:
    """The present value of a view; another DTensor itself."""
    current = getattr(x, "current", None)
    return x if current is None else current()  # type: ignore[no-any-return]


def complete_value(x: DTensor) -> DTensor:
    """``x`` with partial values reduced, one axis after the other, as norms of norms."""
    if not any(p.is_partial() for p in x.placements):
        return x
    follow_call(x, "sum over ranks")
    return settled(x.redistribute(placements=[Replicate() if p.is_partial() else p for p in x.placements]))


def as_global(x: Any) -> Any:
    """A stored DTensor as the global tensor that shares its memory, without autograd; anything else as it is."""
    if not isinstance(x, DTensor):
        return x
    x = complete_value(_current(x))
    return wrap(dtensor_local(x).detach(), stored_layout(x))


def as_recorded(x: Any) -> Any:
    """A stored DTensor as the global tensor that shares its memory, recorded by autograd; anything else as it is."""
    return wrap(dtensor_local(x), stored_layout(x)) if isinstance(x, DTensor) else x


def as_stored(x: Any) -> Any:
    """A global tensor as the stored DTensor of the same value, sums completed; anything else as it is."""
    if not isinstance(x, GlobalTensor):
        return x
    layout = x.global_layout
    states = complete(layout.states)
    local = local_in(x, states).detach()
    target, strides = layout.with_states(states), dense_strides(layout.shape, dim_order_of(local))
    return as_permuted(mesh_value(stock_dtensor(local, target, layout.shape, strides)), target)


def run_by_rules(func: Function, args: Args, kwargs: Mapping[str, Any]) -> Any:
    """Run ``func`` on stored DTensors as on global tensors: sharded where a rule allows it, with one device's random numbers.

    The result is a stored DTensor again, unless autograd records it.
    """
    given: dict[int, Any] = {}

    def lent(x: Any) -> Any:
        value = as_global(x)
        given[id(value)] = x
        return value

    args, kwargs = pytree.tree_map(lent, (args, dict(kwargs)))
    if torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs))
    ):
        return func(*args, **kwargs)
    with torch.no_grad():
        # a function with inplace=True returns the tensor that it is given
        return pytree.tree_map(
            lambda x: given[id(x)] if id(x) in given else as_stored(x), func(*args, **kwargs)
        )
