"""Composites: torch functions handled whole, because op-by-op rules would lose sharding or exactness."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.boxes import Box, chunk_box
from meshwright_dtensor.rules.base import NodeView, Strategy
from meshwright_dtensor.states import States, is_shard
from meshwright_dtensor.trace import Node

LocalFunction = Callable[[list[torch.Tensor]], Any]


def _no_record(kind: str, axis: int, nbytes: int, phase: str) -> None:
    """The default of :attr:`LocalContext.record`."""


@dataclass
class LocalContext:
    """Where one call of a composite runs: mesh, chosen states, global shapes.

    Attributes:
        ins: per tensor input, its state on every mesh axis; likewise ``outs``.
        in_shapes: GLOBAL shapes; likewise ``out_shapes``.
        in_strides: global strides as on one device, or None if not known (random draws follow memory order).
        record: called as ``record(kind, axis, nbytes, phase)`` for communication inside; ``axis`` is the mesh axis index.
    """

    mesh: DeviceMesh
    node: Node
    ins: tuple[States, ...]
    outs: tuple[States, ...]
    in_shapes: tuple[tuple[int, ...], ...]
    out_shapes: tuple[tuple[int, ...], ...]
    in_strides: tuple[tuple[int, ...], ...] | None = None
    record: Callable[[str, int, int, str], None] = _no_record

    def group(self, axis: int) -> dist.ProcessGroup:
        """Process group of this rank along mesh axis ``axis``."""
        return self.mesh.get_group(axis)

    def size(self, axis: int) -> int:
        """Ranks along the axis."""
        return self.mesh.size(axis)

    def rank(self, axis: int) -> int:
        """This rank's place along the axis."""
        return self.mesh.get_local_rank(axis)

    def box(self, shape: tuple[int, ...], states: States) -> Box:
        """(offset, length) per dim of what this rank holds of a tensor."""
        axes = range(self.mesh.ndim)
        return chunk_box(shape, [self.size(a) for a in axes], [self.rank(a) for a in axes], states)

    def axes_sharding(self, index: int, dim: int) -> list[int]:
        """Mesh axes that shard dim ``dim`` of tensor input ``index``."""
        return [axis for axis, state in enumerate(self.ins[index]) if is_shard(state) and state == dim]


class Composite(ABC):
    """A torch function with rules of its own.

    Attributes:
        name: name of its nodes.
        functions: the torch functions it stands for.
    """

    name: ClassVar[str]
    functions: ClassVar[tuple[Callable[..., Any], ...]]

    @abstractmethod
    def normalise(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
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

    def flops(self, view: NodeView) -> float:
        """Floating-point operations of the whole call, forward."""
        return 0.0

    def extra_comm_bytes(self, view: NodeView, strategy: Strategy) -> float:
        """Bytes all-reduced inside the call under ``strategy``, forward and backward together."""
        return 0.0


def float_bytes(shape: tuple[int, ...], itemsize: int = 4) -> int:
    """Size in bytes of a tensor of ``shape``."""
    return math.prod(shape) * itemsize
