"""Composites: torch functions with a rule of their own, because op-by-op rules would lose sharding or exactness."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.comm import group_calls
from meshwright_dtensor.mesh.context import MeshContext, draws_per_shard, follow_call
from meshwright_dtensor.rules.node import NodeView, Strategy
from meshwright_dtensor.sharding.boxes import Box, Interval, Region, chunk_box, region_of
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.trace.graph import Node

LocalFunction = Callable[..., Any]
"""Local inputs -> local result; that of a ``located`` composite also takes the site of the call."""

Bound: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional and keyword arguments of a call, with defaults filled in."""


def from_call(
    function: Callable[..., Bound | None],
) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], Bound | None]:
    """A `Composite.normalise` from a method that has the parameters of the torch function."""
    return lambda composite, args, kwargs: function(composite, *args, **kwargs)


@dataclass
class LocalContext:
    """The mesh, states and global shapes of one call of a composite.

    Attributes:
        ins: per tensor input, its state on every mesh axis; likewise ``outs``.
        in_shapes: GLOBAL shapes; likewise ``out_shapes``.
        record: called as ``record(kind, axis, nbytes, phase)`` for communication inside; ``axis`` is the mesh axis index.
        attention: mesh axis -> context-parallel form of attention on it.
    """

    mesh: DeviceMesh
    node: Node
    ins: tuple[States, ...]
    outs: tuple[States, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    record: Callable[[str, int, int, str], None] = lambda kind, axis, nbytes, phase: None
    attention: Mapping[int, str] = field(default_factory=dict)

    @property
    def context(self) -> MeshContext:
        """The context of the mesh."""
        return MeshContext.of(self.mesh)

    @property
    def per_shard(self) -> bool:
        """Whether each shard has a random stream of its own."""
        return draws_per_shard(self.mesh)

    def group(self, axis: int) -> dist.ProcessGroup:
        """Process group of this rank along mesh axis ``axis``."""
        return self.mesh.get_group(axis)

    @property
    def coords(self) -> tuple[int, ...]:
        """This rank's place along each axis."""
        return tuple(self.rank(axis) for axis in range(self.mesh.ndim))

    def size(self, axis: int) -> int:
        """Ranks along the axis."""
        return self.mesh.size(axis)

    def rank(self, axis: int) -> int:
        """This rank's place along the axis."""
        return self.mesh.get_local_rank(axis)

    def box(self, shape: tuple[int, ...], states: States) -> Box:
        """The box of this rank: (offset, length) per dim."""
        return chunk_box(shape, self.mesh.shape, self.coords, states)

    def region(self, shape: tuple[int, ...], states: States) -> Region:
        """Per dim the intervals of this rank, in local order: a box if no state is an interval shard."""
        return region_of(shape, self.mesh.shape, self.coords, states)

    def intervals(self, index: int, dim: int) -> tuple[Interval, ...]:
        """Positions along ``dim`` of tensor input ``index`` that this rank holds, in its order."""
        return self.region(self.in_shapes[index], self.ins[index])[dim]

    def intervals_along(self, index: int, dim: int, axis: int) -> tuple[tuple[Interval, ...], ...]:
        """The same for every rank along mesh axis ``axis``."""
        sizes, coords = self.mesh.shape, self.coords
        ranks = ((*coords[:axis], rank, *coords[axis + 1 :]) for rank in range(sizes[axis]))
        shape, states = self.in_shapes[index], self.ins[index]
        return tuple(region_of(shape, sizes, rank, states)[dim] for rank in ranks)

    def all_reduce(
        self, tensor: torch.Tensor, axes: Sequence[int], phase: str, op: Any = dist.ReduceOp.SUM
    ) -> torch.Tensor:
        """``tensor``, which is overwritten, reduced over these mesh axes; the collectives are logged."""
        for axis in axes:
            follow_call(self.mesh, f"all_reduce over axis {axis}")
            tensor = group_calls.all_reduce_(tensor, self.group(axis), op)
            self.record("all_reduce", axis, tensor.nbytes, phase)
        return tensor

    def axes_sharding(self, index: int, dim: int) -> list[int]:
        """Mesh axes that shard dim ``dim`` of tensor input ``index``."""
        return [axis for axis, s in enumerate(self.ins[index]) if isinstance(s, int) and int(s) == dim]

    def axes_sharding_others(self, index: int, dim: int) -> list[int]:
        """Mesh axes that shard another dim of tensor input ``index`` than ``dim``."""
        return [axis for axis, s in enumerate(self.ins[index]) if isinstance(s, int) and int(s) != dim]


class Composite(ABC):
    """A torch function with rules of its own.

    Attributes:
        name: name of its nodes.
        functions: the torch functions it stands for.
        located: its local functions are called with (tensors, site of the call), to log communication inside.
        comm_backward: the fraction of `extra_comm_bytes` in the backward pass.
    """

    name: ClassVar[str]
    functions: ClassVar[tuple[Callable[..., Any], ...]]
    located: ClassVar[bool] = False
    comm_backward: ClassVar[float] = 0.0

    @abstractmethod
    def normalise(self, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> Bound | None:
        """The call in canonical positional form with defaults filled in; None leaves it to the op-by-op rules."""

    @abstractmethod
    def strategies(self, view: NodeView) -> list[Strategy]:
        """Raw rows, the replicated one first."""

    @abstractmethod
    def local(self, ctx: LocalContext) -> LocalFunction:
        """Function from the local inputs (in the order of ``node.ins``) to the local result."""

    def plain(self, ctx: LocalContext) -> bool:
        """Whether the torch function itself, run on the locals with the same other arguments, gives the local result."""
        return False

    def permutes(self, view: NodeView, row: Strategy) -> bool:
        """Whether ``row`` also holds for interval shards, where ranks own other elements than chunks."""
        return True

    def flops(self, view: NodeView) -> float:
        """Floating-point operations of the whole call, forward."""
        return 0.0

    def extra_comm_bytes(self, view: NodeView, strategy: Strategy) -> float:
        """Bytes all-reduced inside the call under ``strategy``, forward and backward together (see `comm_backward`)."""
        return 0.0
