"""Layout: the placement of one global value on a mesh."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwright_dtensor._torch.core import dtensor_spec
from meshwright_dtensor._torch.modes import without_modes
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.run_shard import RunShard
from meshwright_dtensor.sharding.boxes import Box, Region, local_shape_of, region_of, region_shape, single_box
from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, States, format_state

if TYPE_CHECKING:
    from collections.abc import Sequence


class Layout:
    """Mesh, one state per mesh axis, global shape and dtype.  Made by :func:`layout_of` only, so equal layouts are identical.

    Attributes:
        context: caches and collectives of the mesh.
        states: one state per mesh axis, outermost first.
        shape: global shape.
        dtype: element type.
        local_shape: shape of this rank's part.
        region: per tensor dim the intervals of the global value that this rank holds, in local order.
        replicated: whether every rank holds the whole value.
        template: an empty meta tensor of the global shape, from which wrappers are made.
    """

    __slots__ = "context states shape dtype ndim local_shape replicated template region".split()

    def __init__(self, context: MeshContext, states: States, shape: torch.Size, dtype: torch.dtype) -> None:
        self.context, self.states, self.shape, self.dtype = context, states, shape, dtype
        self.ndim = len(shape)
        self.replicated = all(s == "I" or s == "X" for s in states)
        self.region: Region = region_of(tuple(shape), context.sizes, context.coords, states)
        self.local_shape = torch.Size(region_shape(self.region))
        # layouts are kept: a mode of the caller, a compiler's for example, would be kept with them
        with without_modes():
            self.template = torch.empty(shape, dtype=dtype, device="meta")

    @property
    def mesh(self) -> DeviceMesh:
        """The device mesh."""
        return self.context.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The states as torch placements."""
        return tuple(placement_of(s) for s in self.states)

    @property
    def box(self) -> Box:
        """(offset, length) per tensor dim of this rank's part. Raises UsageError if it is several boxes; see :attr:`region`."""
        box = single_box(self.region)
        if box is None:
            raise UsageError(
                f"{self!r} gives this rank several boxes; use layout.region with boxes.region_boxes, read_region and write_region"
            )
        return box

    def with_states(self, states: States) -> Layout:
        """The layout of the same value in other states."""
        return layout_of(self.context, states, self.shape, self.dtype)

    def with_dtype(self, dtype: torch.dtype) -> Layout:
        """The layout of a value of another dtype."""
        return layout_of(self.context, self.states, self.shape, dtype)

    def local_shape_at(self, coords: Sequence[int]) -> tuple[int, ...]:
        """Shape of the part of the rank at mesh coordinates ``coords``."""
        return local_shape_of(tuple(self.shape), self.context.sizes, tuple(coords), self.states)

    def inside(self, axes: Sequence[int]) -> Layout:
        """This rank's part as a part of the value that the ranks along `axes` (numbers, in order) hold together.

        That value is the local part with respect to all other axes.  If `axes` and other axes shard the same dim, the other
        axes must be the outer ones.
        """
        context = self.context
        others = tuple("I" if axis in axes else s for axis, s in enumerate(self.states))
        shape = local_shape_of(tuple(self.shape), context.sizes, context.coords, others)
        inner = context.inner(tuple(context.axes[axis] for axis in axes))
        return layout_of(inner, tuple(self.states[axis] for axis in axes), shape, self.dtype)

    def __repr__(self) -> str:
        axes = ", ".join(
            f"{a}={format_state(s)}" for a, s in zip(self.context.axes, self.states, strict=True)
        )
        return f"Layout({list(self.shape)} {str(self.dtype).removeprefix('torch.')} {axes})"

    def _repr_html_(self) -> str:
        """Which rank holds which part, for a notebook."""
        from meshwright_dtensor.mesh.layout_picture import layout_html

        return layout_html(self)

    @property
    def nbytes(self) -> int:
        """Size of the global value in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


def layout_of(
    context: MeshContext, states: States, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype
) -> Layout:
    """The one :class:`Layout` object with these fields."""
    return context.cached(_layout, states, tuple(shape), dtype)


def _layout(context: MeshContext, states: States, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
    # on an axis of one rank every state is the same
    canonical = tuple("I" if n == 1 else s for s, n in zip(states, context.sizes, strict=True))
    if canonical != states:
        return context.cached(_layout, canonical, shape, dtype)
    return Layout(context, states, torch.Size(shape), dtype)


def replicated_layout(context: MeshContext, tensor: torch.Tensor) -> Layout:
    """The layout of a plain tensor, which every rank holds whole."""
    return layout_of(context, context.replicated, tensor.shape, tensor.dtype)


def stock_layout(dtensor: DTensor) -> Layout:
    """The layout that the placements of a DTensor name."""
    spec = dtensor_spec(dtensor)
    context = MeshContext.of(spec.mesh)
    states = states_of(spec.placements, spec.shape, context)
    return layout_of(context, states, spec.shape, spec.tensor_meta.dtype)


def placement_of(state: State) -> Placement:
    """The torch placement of a state: ``I`` and ``X`` are both Replicate, an interval shard is a :class:`RunShard`."""
    if isinstance(state, IntervalShard):
        return RunShard(int(state), state.intervals)
    if isinstance(state, int):
        return Shard(state)
    return Partial() if state == "P" else Replicate()


def stored_placement(state: State) -> Placement:
    """The placement of a parameter's DTensor: for an interval shard, Shard of the permuted tensor."""
    return Shard(int(state)) if isinstance(state, int) else placement_of(state)


def state_of(placement: Placement, ndim: int) -> State:
    """The state of a Replicate, Shard, RunShard or Partial(sum) of a tensor with ``ndim`` dims; UnsupportedError for others."""
    if placement.is_replicate():
        return "I"
    if type(placement) is Shard or isinstance(placement, RunShard):
        dim = placement.dim + ndim if placement.dim < 0 else placement.dim
        if not 0 <= dim < ndim:
            raise UnsupportedError(
                f"placement {placement} names a dim of a {ndim}-D tensor; legal dims are 0..{ndim - 1}"
            )
        return placement.state(dim) if isinstance(placement, RunShard) else dim
    if type(placement) is Partial and placement.reduce_op == "sum":
        return "P"
    raise UnsupportedError(
        f"placement {placement} is not supported in a global tensor; use Replicate(), Shard(dim), RunShard(dim, intervals) "
        "or Partial('sum')"
    )


def states_of(placements: Sequence[Placement | State], shape: Sequence[int], context: MeshContext) -> States:
    """States of a tensor of `shape` from a mix of torch placements and states, one per mesh axis; negative dims are resolved.

    Raises UnsupportedError: a wrong number of placements, or one that global tensors do not know. UsageError: the intervals
    of a RunShard are those of another size of the dim, or of another number of ranks.
    """
    if len(placements) != context.ndim:
        raise UnsupportedError(
            f"{len(placements)} placements were given for a mesh of {context.ndim} axes; give one per axis, outermost first"
        )
    ndim = len(shape)
    states = tuple(
        p
        if isinstance(p, str) and p in ("I", "X", "P")
        else state_of(placement_of(p) if isinstance(p, int) else p, ndim)  # type: ignore[arg-type]
        for p in placements
    )
    chunks = {
        axis: IntervalShard(state, p.intervals)
        for axis, (p, state) in enumerate(zip(placements, states, strict=True))
        if isinstance(p, RunShard) and type(state) is int and context.sizes[axis] > 1
    }
    if chunks:
        # intervals that are plain chunks became their dim, which fits any size
        given = [chunks.get(axis, state) for axis, state in enumerate(states)]
        region_of(tuple(shape), context.sizes, context.coords, given)
    return states
