"""Compute copies that are gathered unit by unit: a repeated block of the model, or what is left outside of blocks.

A unit has one flat buffer in the compute dtype; the compute copy of each of its parameters is a leaf tensor over a part of
it. Gathering takes one collective: the stored parts are cast into a row, rows are gathered, parts are copied out.

    stored parts --cast--> row [width] --all-gather--> rows [n, width] --copy--> buffer, of which the leaves are views

A large part that needs no cast, and lies in the whole as it is stored, is gathered straight into the buffer by a
collective of its own.

A buffer that is given up is dropped, never resized: whoever still holds a view of it reads what was there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.mesh.layout import Layout
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of
from meshwright_dtensor.tensor.compute_copy import ComputeCopy, mark_as_copy
from meshwright_parallel._torch.core import copy_all, count_write, local_of, storage_key, versions
from meshwright_parallel.engine.flat_shards import Shards, single_bytes

if TYPE_CHECKING:
    from meshwright_parallel.engine.unshard import Gathering


class State(Enum):
    """Of a unit's buffer."""

    STALE = 0
    FLYING = 1
    READY = 2


class Copy(ComputeCopy):
    """The compute copy of one parameter.

    Attributes:
        parameter: whose copy it is.
        axis: mesh axis along which the parameter is stored in shards, "" where it is stored whole.
        shards: how.
        unit: the unit that it is gathered with.
        offset: its first element in the buffer of the unit.
        direct: it is gathered alone, without copies.
        version: how often its value has changed, as far as torch counts that.
    """

    __slots__ = (
        "_leaf",
        "_nothing",
        "axis",
        "direct",
        "offset",
        "parameter",
        "seen",
        "shards",
        "unit",
        "version",
    )

    unit: Unit

    def __init__(self, parameter: MeshParameter, layout: Layout, axis: str, shards: Shards | None) -> None:
        super().__init__(layout)
        self.parameter, self.axis, self.shards = parameter, axis, shards
        self.offset = self.version = 0
        self.seen: int | None = None  # what versions() said when it was last gathered
        stored = local_of(parameter)
        self.direct = (
            shards is not None
            and shards.in_rows
            and stored.dtype == layout.dtype
            and stored.numel() * stored.element_size() >= single_bytes(stored.device)
        )
        shape = layout.local_shape
        # outside of forward and backward: no memory, the right shape, and nothing that could pass for a value
        self._nothing = stored.new_full((1,), math.nan, dtype=layout.dtype).detach().expand(shape)
        self._leaf = torch.empty(0, dtype=layout.dtype, device=self._nothing.device)
        self._leaf.data = self._nothing
        self._leaf.requires_grad_(parameter.requires_grad)
        mark_as_copy(self._leaf)

    @property
    def computing(self) -> bool:
        """Whether a forward of the model is running."""
        return self.unit.engine.depth > 0

    @property
    def now(self) -> int:
        """A number that grows whenever the parameter is written to, as far as torch counts writes."""
        return versions([self.parameter])[0] + self.touched

    @property
    def outdated(self) -> bool:
        """Whether the parameter has been written to since it was last gathered."""
        return self.seen != self.now

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of the copy, whose dims lie in memory as those of the stored part."""
        if self.shards is not None:
            return self.shards.strides
        local = local_of(self.parameter)
        return dense_strides(local.shape, dim_order_of(local))

    def take(self) -> torch.Tensor:
        """See ComputeCopy."""
        unit = self.unit
        engine = unit.engine
        if unit.state is not State.READY:
            engine.need(unit)
        if self.outdated if engine.depth else engine.changed(unit):  # a forward may write to its parameters
            engine.need(unit)
        # a leaf is saved by autograd as itself, and would lose its memory where no hook sees that
        return self._leaf if engine.leaves_are_safe else self._leaf.view_as(self._leaf)

    def leaf(self) -> torch.Tensor:
        """See ComputeCopy."""
        return self._leaf

    def stored_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """See ComputeCopy."""
        part = gradient if self.shards is None else self.shards.part(gradient)
        stored = local_of(self.parameter)
        return torch.empty_like(stored, requires_grad=False).copy_(part)

    def follow(self, requires_grad: bool) -> None:
        """See ComputeCopy."""
        self._leaf.requires_grad_(requires_grad)

    def gradient_taken(self) -> None:
        """The gradient of this pass has arrived and has been taken away."""
        self.unit.engine.gradient_taken(self.unit)

    def show(self, buffer: torch.Tensor | None) -> None:
        """Lay the leaf over its part of `buffer`; None: over nothing."""
        if buffer is None:
            self._leaf.data = self._nothing
        else:
            self._leaf.data = buffer.as_strided(self._nothing.shape, self.strides, self.offset)


def copy_of(parameter: torch.Tensor) -> Copy | None:
    """The gathered compute copy of a parameter, if it has one."""
    found = parameter._copy if isinstance(parameter, MeshParameter) else None
    return found if isinstance(found, Copy) else None


class Unit:
    """Compute copies that are gathered together; all of one dtype, stored in one dtype, on one device.

    Attributes:
        index: its place among the units of the engine.
        name: of the module, for messages.
        outside: holds what lies outside of blocks.
        fired: copies whose gradient of this pass has arrived.
    """

    def __init__(
        self, engine: Gathering, index: int, name: str, outside: bool, copies: Sequence[Copy]
    ) -> None:
        self.engine, self.index, self.name, self.outside = engine, index, name, outside
        self.copies = tuple(copies)
        self.state = State.STALE
        self.fired = 0
        self.buffer: torch.Tensor | None = None
        self.width = self.numel = 0
        self._rows: list[int] = []  # where each copy's part begins in a row
        for copy in self.copies:
            copy.unit, copy.offset = self, self.numel
            self.numel += math.prod(copy.layout.local_shape)
            self._rows.append(self.width)
            self.width += 0 if copy.shards is None or copy.direct else copy.shards.size
        first = self.copies[0]
        self.dtype, self.device = first.layout.dtype, first.leaf().device
        shared = [copy for copy in self.copies if copy.shards is not None]
        self.axis = shared[0].axis if shared else ""
        self.count = shared[0].shards.count if shared and shared[0].shards else 1
        self._gathered: torch.Tensor | None = None
        self._works: list[dist.Work] = []
        self._changed: list[Copy] = []

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer."""
        return self.numel * self.dtype.itemsize

    @property
    def trainable(self) -> int:
        """How many of its copies take part in training."""
        return sum(copy.leaf().requires_grad for copy in self.copies)

    def launch(self) -> None:
        """Start gathering."""
        with torch.inference_mode(False), torch.no_grad():
            self._note_changes()
            for copy in self.copies:
                if copy.direct:
                    self._allocate()
                    whole = copy.leaf().data
                    self._gather(_flat(whole, copy.strides), _flat(local_of(copy.parameter), copy.strides))
            if self.width:
                row = torch.empty(self.width, dtype=self.dtype, device=self.device)
                pairs = [
                    (copy.shards.in_row(row[start:]), local_of(copy.parameter))
                    for copy, start in zip(self.copies, self._rows, strict=True)
                    if copy.shards is not None and not copy.direct
                ]
                copy_all(pairs)
                self._gathered = torch.empty(self.count, self.width, dtype=self.dtype, device=self.device)
                self._gather(self._gathered.view(-1), row)
            count_write([copy.leaf() for copy in self._changed if copy.direct])
        self.state = State.FLYING

    def _gather(self, rows: torch.Tensor, row: torch.Tensor) -> None:
        record(
            "all_gather",
            self.axis,
            rows.numel() * rows.element_size(),
            self.engine.phase,
            self.name,
            "zero",
            "S->X",
        )
        group = self.engine.mesh.get_group(self.axis)
        self._works.append(dist.all_gather_single(rows, row, group=group, async_op=True))

    def _allocate(self) -> None:
        if self.buffer is None:
            self.buffer = torch.empty(self.numel, dtype=self.dtype, device=self.device)
            for copy in self.copies:
                copy.show(self.buffer)
            self.engine.storages[storage_key(self.buffer)] = self

    def _wait(self) -> torch.Tensor | None:
        """End what was launched; the rows that were gathered."""
        for work in self._works:
            work.wait()
        rows, self._gathered, self._works = self._gathered, None, []
        return rows

    def finish(self) -> None:
        """Wait for what was launched and lay it out."""
        rows = self._wait()
        with torch.inference_mode(False), torch.no_grad():
            self._allocate()
            pairs = []
            for copy, start in zip(self.copies, self._rows, strict=True):
                if copy.direct:
                    continue
                whole = copy.leaf().data  # whose version count is its own: only real changes count
                if copy.shards is None:
                    pairs.append((whole, local_of(copy.parameter)))
                else:
                    assert rows is not None
                    part = rows[:, start : start + copy.shards.size]
                    pairs += [(out, value) for value, out in copy.shards.pairs(part, whole)]
            copy_all(pairs)
            count_write([copy.leaf() for copy in self._changed if not copy.direct])
        self.state = State.READY

    def drop(self, keep_memory: bool = False) -> None:
        """Give up what is gathered. `keep_memory`: only its values count as stale."""
        self._wait()
        if not keep_memory and self.buffer is not None:
            for copy in self.copies:
                copy.show(None)
            del self.engine.storages[storage_key(self.buffer)]
            self.buffer = None
        self.state = State.STALE
        self.fired = 0

    def changed(self) -> bool:
        """Whether a parameter has been written to since it was last gathered, as far as torch counts writes."""
        return any(copy.outdated for copy in self.copies)

    def copy_at(self, offset: int) -> Copy:
        """The copy that holds this element of the buffer."""
        return self.copies[bisect_right(self.copies, offset, key=lambda copy: copy.offset) - 1]

    def _note_changes(self) -> None:
        self._changed = []
        for copy in self.copies:
            now = copy.now
            if copy.seen not in (None, now):
                self._changed.append(copy)
                copy.version += 1
            copy.seen = now


def _flat(value: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    """The elements of `value` in the order in which `strides` have their dims in memory; no copy where they lie so."""
    order = sorted(range(value.dim()), key=lambda dim: -strides[dim])
    return value.permute(order).reshape(-1)
