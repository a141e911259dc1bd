"""Unsharded parameters and parameter groups, as in FSDP2: what is all-gathered together.

A parameter group is one repeated block of the model, or the parameters outside of blocks. It has one flat buffer in the compute
dtype. The unsharded form of each parameter is a leaf tensor that is a view of the buffer. Unsharding takes one collective:

    stored parts --cast--> row [width] --all-gather--> rows [n, width] --copy--> buffer, of which the leaves are views

A large parameter that needs no cast, and whose shards are contiguous in the whole, is gathered straight into the buffer by
a collective of its own. So is one that a single rank owns: it is broadcast.

Resharding drops the buffer and never resizes it: whoever still holds a view of it reads the old values.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices.waits import wait_for
from meshwright_dtensor.mesh.context import follow_call
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of
from meshwright_dtensor.tensor.compute_copy import ComputeCopy, mark_as_copy
from meshwright_parallel._torch.checkpoint import selective_checkpointing, without_modes
from meshwright_parallel._torch.core import copy_all, count_write, local_of, storage_key, versions
from meshwright_parallel.engine.flat_shards import Shards, row_starts, single_bytes


class UnshardState(Enum):
    """State of a group's buffer."""

    STALE = 0
    IN_FLIGHT = 1
    READY = 2


class Unsharder(Protocol):
    """What a parameter group needs of the engine that schedules it (`unshard.UnshardEngine`).

    Attributes:
        storages: storage of a buffer -> its group.
        forward_depth: nested forwards that run now.
        leaves_are_safe: autograd may save a leaf itself, because nothing frees its memory unnoticed.
    """

    mesh: DeviceMesh
    storages: dict[int, ParamGroup]
    forward_depth: int
    leaves_are_safe: bool

    @property
    def phase(self) -> str: ...
    def unshard(self, group: ParamGroup) -> None: ...
    def is_outdated(self, group: ParamGroup) -> bool: ...
    def unshard_for_backward(self, group: ParamGroup) -> None: ...
    def gradient_consumed(self, group: ParamGroup) -> None: ...
    def end_backward(self) -> None: ...


class UnshardedParameter(ComputeCopy):
    """The compute copy of one parameter: unsharded, cast, or both.

    Attributes:
        axis: mesh axis along which the parameter is stored in shards, "" where it is stored whole.
        offset: its first element in the buffer of the group.
        gathered_alone: it has a collective of its own, without copies.
        version: how often its value has changed, as far as torch counts that.
        gathered_writes: `writes` when it was last unsharded.
    """

    __slots__ = tuple(
        "_leaf _placeholder axis gathered_alone gathered_writes group offset parameter shards version".split()
    )

    group: ParamGroup

    def __init__(self, parameter: MeshParameter, layout: Layout, axis: str, shards: Shards | None) -> None:
        super().__init__(layout)
        self.parameter, self.axis, self.shards = parameter, axis, shards
        self.offset = self.version = 0
        self.gathered_writes: int | None = None
        stored = local_of(parameter)
        self.gathered_alone = shards is not None and (
            # a part of each rank, or all of one rank
            (shards.in_rows and stored.dtype == layout.dtype and stored.nbytes >= single_bytes(stored.device))
            or shards.is_owned_alone(layout.dtype)
        )
        # while resharded: the right shape, no memory, and values that nobody takes for real ones; integers have none
        fill = math.nan if layout.dtype.is_floating_point or layout.dtype.is_complex else 0
        filler = stored.new_full((1,), fill, dtype=layout.dtype).detach()
        self._placeholder = filler.expand(layout.local_shape)
        self._leaf = torch.empty(0, dtype=layout.dtype, device=self._placeholder.device)
        self._leaf.data = self._placeholder
        self._leaf.requires_grad_(parameter.requires_grad)
        mark_as_copy(self._leaf)

    @property
    def computing(self) -> bool:
        """Whether a forward of the model is running."""
        return self.group.engine.forward_depth > 0

    @property
    def writes(self) -> int:
        """A number that grows whenever the parameter is written to, as far as torch counts writes."""
        return versions([self.parameter])[0] + self.touched

    @property
    def outdated(self) -> bool:
        """Whether the parameter was written to since it was last unsharded."""
        return self.gathered_writes != self.writes

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the leaf, which has the memory order of the stored part."""
        if self.shards is not None:
            return self.shards.strides
        local = local_of(self.parameter)
        return dense_strides(local.shape, dim_order_of(local))

    def take(self) -> torch.Tensor:
        # whether a parameter is gathered may differ between the two runs of a checkpointed region
        if selective_checkpointing():
            with without_modes():
                return self._take()
        return self._take()

    def _take(self) -> torch.Tensor:
        group = self.group
        engine = group.engine
        if group.state is not UnshardState.READY:
            engine.unshard(group)
        # a forward may write to its parameters
        if self.outdated if engine.forward_depth else engine.is_outdated(group):
            engine.unshard(group)
        # autograd saves a leaf as itself: without hooks it would lose its memory
        return self._leaf if engine.leaves_are_safe else self._leaf.view_as(self._leaf)

    def leaf(self) -> torch.Tensor:
        return self._leaf

    def stored_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        part = gradient if self.shards is None else self.shards.part(gradient)
        return torch.empty_like(local_of(self.parameter), requires_grad=False).copy_(part)

    def follow(self, requires_grad: bool) -> None:
        self._leaf.requires_grad_(requires_grad)

    def map_to(self, buffer: torch.Tensor | None) -> None:
        """Make the leaf a view of its part of `buffer`; None: of the placeholder."""
        if buffer is None:
            self._leaf.data = self._placeholder
        else:
            self._leaf.data = buffer.as_strided(self._placeholder.shape, self.strides, self.offset)


def unsharded_of(parameter: torch.Tensor) -> UnshardedParameter | None:
    """The unsharded form of a parameter, if it has one."""
    copy = parameter._copy if isinstance(parameter, MeshParameter) else None
    copy = None if copy is None else copy.of_engine
    return copy if isinstance(copy, UnshardedParameter) else None


@dataclass
class GroupSpec:
    """The parameters of one group: those of the block `name`, or those outside of blocks (`is_root`)."""

    name: str
    is_root: bool
    parameters: list[UnshardedParameter]


class ParamGroup:
    """Parameters that are unsharded together: one compute dtype, one stored dtype, one device.

    Attributes:
        index: its place among the groups of the engine.
        name: of the module, for messages.
        is_root: holds the parameters outside of blocks.
        consumed_gradients: parameters whose gradient of this pass was moved to its bucket.
    """

    def __init__(self, engine: Unsharder, index: int, spec: GroupSpec) -> None:
        self.engine, self.index, self.name, self.is_root = engine, index, spec.name, spec.is_root
        self.parameters = tuple(spec.parameters)
        self.state = UnshardState.STALE
        self.consumed_gradients = 0
        self.buffer: torch.Tensor | None = None
        self.numel = 0
        for parameter in self.parameters:
            parameter.group, parameter.offset = self, self.numel
            self.numel += math.prod(parameter.layout.local_shape)
        gathered = [(p, p.shards) for p in self.parameters if p.shards is not None and not p.gathered_alone]
        # of the experts of other ranks nobody here has anything
        in_rows = [(p, shards) for p, shards in gathered if any(shards.sizes)]
        starts, self.width = row_starts([shards for _, shards in in_rows])
        # the parameters of a row: where the part of each rank begins
        self._in_rows = [(p, shards, at) for (p, shards), at in zip(in_rows, starts, strict=True)]
        first = self.parameters[0]
        self.dtype, self.device = first.layout.dtype, first.leaf().device
        sharded = [parameter for parameter in self.parameters if parameter.shards is not None]
        self.axis = sharded[0].axis if sharded else ""
        self.count = sharded[0].shards.count if sharded and sharded[0].shards else 1
        self._rows: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._changed: list[UnshardedParameter] = []

    @property
    def trainable(self) -> int:
        """How many of its parameters require gradients."""
        return sum(parameter.leaf().requires_grad for parameter in self.parameters)

    def start_unshard(self) -> None:
        """Launch the all-gathers."""
        if self.axis:
            # one call, however many collectives it takes: ranks of other experts have others to gather
            follow_call(self.engine.mesh, "unshard")
        with torch.inference_mode(False), torch.no_grad():
            self._changed = []
            for unsharded in self.parameters:
                writes = unsharded.writes
                if unsharded.gathered_writes not in (None, writes):
                    self._changed.append(unsharded)
                    unsharded.version += 1
                unsharded.gathered_writes = writes
            for unsharded in self.parameters:
                if unsharded.gathered_alone:
                    self._allocate()
                    self._gather_alone(unsharded)
            if self.width:
                row = torch.empty(self.width, dtype=self.dtype, device=self.device)
                copy_all(
                    [
                        (shards.in_row(row[starts[shards.rank] :]), local_of(unsharded.parameter))
                        for unsharded, shards, starts in self._in_rows
                    ]
                )
                self._rows = torch.empty(self.count, self.width, dtype=self.dtype, device=self.device)
                self._all_gather(self._rows.view(-1), row)
            count_write([unsharded.leaf() for unsharded in self._changed if unsharded.gathered_alone])
        self.state = UnshardState.IN_FLIGHT

    def _gather_alone(self, unsharded: UnshardedParameter) -> None:
        """Gather one parameter straight into the buffer; one of a single rank is broadcast from there."""
        assert unsharded.shards is not None
        whole, strides, owner = unsharded.leaf().data, unsharded.strides, unsharded.shards.owner
        if owner is None:
            self._all_gather(_flat(whole, strides), _flat(local_of(unsharded.parameter), strides))
            return
        if owner == unsharded.shards.rank:
            whole.copy_(local_of(unsharded.parameter))
        record("broadcast", self.axis, whole.nbytes, self.engine.phase, self.name, "zero", "S->X")
        group = self.engine.mesh.get_group(self.axis)
        self._works.append(dist.broadcast(_flat(whole, strides), group=group, group_src=owner, async_op=True))

    def _all_gather(self, rows: torch.Tensor, row: torch.Tensor) -> None:
        record("all_gather", self.axis, rows.nbytes, self.engine.phase, self.name, "zero", "S->X")
        group = self.engine.mesh.get_group(self.axis)
        self._works.append(dist.all_gather_single(rows, row, group=group, async_op=True))

    def _allocate(self) -> None:
        if self.buffer is None:
            self.buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            for unsharded in self.parameters:
                unsharded.map_to(self.buffer)
            self.engine.storages[storage_key(self.buffer)] = self

    def _wait(self) -> torch.Tensor | None:
        """Wait for the all-gathers; returns the gathered rows."""
        for work in self._works:
            wait_for(work)
        rows, self._rows, self._works = self._rows, None, []
        return rows

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers, and copy the rows into the buffer."""
        rows = self._wait()
        with torch.inference_mode(False), torch.no_grad():
            self._allocate()
            # .data has its own version count: only real changes are counted
            pairs = [(u.leaf().data, local_of(u.parameter)) for u in self.parameters if u.shards is None]
            for unsharded, shards, starts in self._in_rows:
                assert rows is not None
                parts = shards.pairs(rows, starts, unsharded.leaf().data)
                pairs += [(out, value) for value, out in parts]
            copy_all(pairs)
            count_write([unsharded.leaf() for unsharded in self._changed if not unsharded.gathered_alone])
        self.state = UnshardState.READY

    def reshard(self, keep_memory: bool = False) -> None:
        """Drop the unsharded values; with `keep_memory` only mark them as stale."""
        self._wait()
        if not keep_memory and self.buffer is not None:
            for unsharded in self.parameters:
                unsharded.map_to(None)
            del self.engine.storages[storage_key(self.buffer)]
            self.buffer = None
        self.state = UnshardState.STALE
        self.consumed_gradients = 0

    def parameter_at(self, offset: int) -> UnshardedParameter:
        """The parameter that holds this element of the buffer."""
        return self.parameters[bisect_right(self.parameters, offset, key=lambda u: u.offset) - 1]


def _flat(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The elements of `value` in the memory order of `strides`; a view where `value` has that order."""
    return value.permute(sorted(range(value.dim()), key=lambda dim: -strides[dim])).reshape(-1)
