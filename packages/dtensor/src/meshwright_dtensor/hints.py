"""Sharding hints: a user fixes the placement of a parameter or activation, and the planner keeps it.

    mw.mark_sharding(model.layers[0].up.weight, {"tp": Shard(0)})      # before planning: the planner keeps to it
    x = mw.mark_sharding(x, {"tp": Shard(1)})                          # in a forward: the value is redistributed

A mark has no effect on one device, nor on axes that the mesh does not have.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.layout import placement_of, state_of
from meshwright_dtensor.mesh.run_shard import RunShard
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.tensor.global_tensor import GlobalTensor

_ATTRIBUTE = "_meshwright_marks"

_WATCHER: ContextVar[Callable[[dict[str, State]], None] | None] = ContextVar("_WATCHER", default=None)


def mark_sharding(tensor: torch.Tensor, placements: Mapping[str, Placement | State]) -> torch.Tensor:
    """Fix the placement of a tensor on some mesh axes.

    Args:
        tensor: a parameter before planning, or an activation inside a forward.
        placements: mesh axis -> Shard(dim), Replicate(), a dim or "I". The planner decides on all other axes.

    Returns:
        The parameter itself; for an activation the same value, redistributed if it is a global tensor.

    Raises:
        UsageError: the placement is none of these, or the parameter is on a mesh already.
        UnsupportedError: the tensor has no such dim, or an activation's dim is too short to be sharded over the axis.
    """
    wanted = {axis: _state(tensor, axis, placement) for axis, placement in placements.items()}
    if isinstance(tensor, DTensor):
        raise UsageError(
            "mark_sharding of a parameter that is on a device mesh already; mark it before plan() and parallelize(), or write "
            "the placement into plan.parameters"
        )
    if isinstance(tensor, nn.Parameter):
        vars(tensor)[_ATTRIBUTE] = {**marks_of(tensor), **wanted}
        return tensor
    watcher = _WATCHER.get()
    if watcher is not None:
        watcher(wanted)
    if not isinstance(tensor, GlobalTensor):
        return tensor
    layout = tensor.global_layout
    states = [
        state if wanted.get(axis, state) == state or (state == "X" and wanted[axis] == "I") else wanted[axis]
        for axis, state in zip(layout.context.axes, layout.states, strict=True)
    ]
    return tensor.redistribute(states)


@contextlib.contextmanager
def observe_marks(seen: Callable[[dict[str, State]], None]) -> Iterator[None]:
    """While open, `seen` is called with each mark of an activation: mesh axis -> state."""
    token = _WATCHER.set(seen)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def marks_of(parameter: torch.Tensor) -> dict[str, State]:
    """Mesh axis -> state, from the marks on a parameter."""
    marks: dict[str, State] = vars(parameter).get(_ATTRIBUTE, {})
    return marks


def _state(tensor: torch.Tensor, axis: str, placement: Any) -> State:
    if placement == "I":
        return "I"
    if isinstance(placement, (Placement, int)) and not isinstance(placement, bool):
        state = state_of(placement_of(placement) if isinstance(placement, int) else placement, tensor.dim())
        if type(state) is int and isinstance(placement, RunShard) and placement.size != tensor.shape[state]:
            raise UsageError(
                f"mark on axis {axis!r} is {placement!r}, chunks of {placement.size} elements of dim {state}, which has "
                f"{tensor.shape[state]}: use Shard({state})"
            )
        if state == "I" or isinstance(state, int):
            return state
    raise UsageError(f"mark on axis {axis!r} is {placement!r}; use Shard(dim), a dim, Replicate() or 'I'")
