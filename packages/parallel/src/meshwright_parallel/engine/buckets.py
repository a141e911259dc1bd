"""Buckets: gradients that are summed over the same axes by one collective.

A bucket is one flat buffer. Behind the gradients lies one flag per parameter, 1 where this rank had a gradient: after
the sum, a flag above zero says that SOME rank had one, so ranks can never disagree on which gradients stay None.

Gradients of parameters that are stored in shards lie in the buffer as one row per rank of the sharing axis; a
reduce-scatter leaves each rank the sum of its row, which is then summed over the axes of replicas.

A large gradient is summed where it lies, by a collective of its own (`Single`), instead of being copied; its flag travels
with a bucket of the same kind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.mesh.mesh import group_over
from meshwright_parallel._torch.core import just_accumulated, local_of, seen_by_none_else
from meshwright_parallel.engine.flat_shards import Shards, single_bytes

Axes = tuple[str, ...]
_Kind = TypeVar("_Kind", bound="Bucket")


@dataclass
class Slot:
    """One parameter of the engine and its place in a bucket.

    Attributes:
        name: fully qualified name, for messages.
        leaf: the tensor at which autograd accumulates: plain, or a stock DTensor.
        axes: mesh axes over which its gradient is partial, but for the one that shares it.
        holder: the tensor whose `.grad` shows the sum: the leaf itself, or the stored part of which it is a copy.
        shared: the axis along which the holder is a shard of the leaf, "" where there is none.
        shards: how it is cut there.
        unit: what is shared together: gradients of one unit and dtype make one bucket.
        index: its place among the slots of the engine.
        bucket, position, offset: number of its bucket, its place there, its first element there.
    """

    name: str
    leaf: torch.Tensor
    axes: Axes
    holder: torch.Tensor
    shared: str = ""
    shards: Shards | None = None
    unit: int = -1
    index: int = 0
    bucket: int = -1
    position: int = 0
    offset: int = 0

    @cached_property
    def numel(self) -> int:
        """Elements of this rank's part in a row of the buffer."""
        return local_of(self.leaf).numel() if self.shards is None else self.shards.size

    @cached_property
    def shape(self) -> torch.Size:
        """This rank's part of the sum."""
        return local_of(self.holder).shape

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of a fresh gradient of the leaf: those of the parameter where that is dense."""
        if self.shards is not None:
            return self.shards.strides
        local = local_of(self.holder)
        return local.stride() if local.is_contiguous() else torch.empty_like(local, device="meta").stride()

    @property
    def in_rows(self) -> bool:
        """Whether a gradient of the leaf is in memory what is summed: the parts of the ranks one after the other."""
        if self.leaf.dtype != self.holder.dtype or isinstance(self.leaf, DTensor):
            return False
        return self.shards is None or self.shards.in_rows

    @property
    def copied(self) -> bool:
        """Whether the gradient goes to another tensor than the one at which it arrives."""
        return self.holder is not self.leaf

    @property
    def all_axes(self) -> Axes:
        """The axes over which the gradient that arrives is partial."""
        return (*self.axes, self.shared) if self.shared else self.axes


@dataclass
class Bucket:
    """Slots reduced together, and the state of their reduction in the current backward pass.

    Attributes:
        axes: summed over by an all-reduce.
        shared, count: axis of the reduce-scatter and its ranks; "" and 1 where there is none.
        dtype: of the sums, which is that of the holders.
        again: the buffer is taken again once no gradient lies in it any more: a CPU gets fresh memory page by page.
        guests: by its index, where among the flags lies that of a slot that is summed alone.
        before: the last buffer in which gradients were left, for `again`.
        lent: gradients are left in the buffer of this pass.
        views: by position, what `view` has made in this pass.
    """

    axes: Axes
    shared: str
    count: int
    dtype: torch.dtype
    device: torch.device
    again: bool = False
    slots: list[Slot] = field(default_factory=list)
    guests: dict[int, int] = field(default_factory=dict)
    numel: int = 0
    arrived: set[int] = field(default_factory=set)
    rows: torch.Tensor | None = None
    before: torch.Tensor | None = None
    lent: bool = False
    result: torch.Tensor | None = None
    work: dist.Work | None = None
    views: dict[int, torch.Tensor] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient on this rank."""
        return len(self.arrived) == len(self.slots) + len(self.guests)

    @property
    def width(self) -> int:
        """Elements of a row: gradients, then one flag per slot and guest."""
        return self.numel + len(self.slots) + len(self.guests)

    def add(self, slot: Slot) -> None:
        """Give a slot its place."""
        slot.position, slot.offset = len(self.slots), self.numel
        self.slots.append(slot)
        self.numel += slot.numel

    def buffer(self) -> torch.Tensor:
        """The buffer [ranks that share, width]; in every pass one that nobody else sees, where gradients become views of it."""
        if self.rows is None and self.before is not None and seen_by_none_else(self.before):
            self.rows = self.before
        if self.rows is None:
            self.rows = torch.empty(self.count, self.width, dtype=self.dtype, device=self.device)
        return self.rows

    def view(self, slot: Slot) -> torch.Tensor:
        """Where the sum of a slot's gradient lies in the end, with the strides a fresh gradient would have."""
        if slot.shards is not None:
            return slot.shards.in_row(
                (self.buffer()[0] if self.result is None else self.result)[slot.offset :]
            )
        view = self.views.get(slot.position)
        if view is None:
            rows = self.buffer()
            # dense, in the parameter's order of dims
            view = rows.as_strided(slot.shape, slot.strides, rows.storage_offset() + slot.offset)
            self.views[slot.position] = view
        return view

    def lend(self, slot: Slot) -> torch.Tensor:
        """The same, as a gradient that lies there beyond the pass."""
        self.lent = True
        return self.view(slot)

    def put(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Take this rank's part of a gradient in."""
        if slot.shards is None:
            self.view(slot).copy_(gradient)
        else:
            rows = self.buffer()[:, slot.offset : slot.offset + slot.numel]
            for row, part in slot.shards.pairs(rows, gradient):
                row.copy_(part)
        self.arrived.add(slot.position)

    def launch(self, mesh: DeviceMesh) -> None:
        """Start the sum and return at once; what has not arrived counts as zero."""
        rows = self._filled()
        if self.shared:
            self.result = torch.empty(rows.shape[1], dtype=self.dtype, device=self.device)
            nbytes = rows.numel() * rows.element_size()
            record("reduce_scatter", self.shared, nbytes, "backward", function="zero", why="X->S")
            group = mesh.get_group(self.shared)
            self.work = dist.reduce_scatter_single(self.result, rows.view(-1), group=group, async_op=True)
        else:
            self.work = self._sum(rows[0], mesh)

    def advance(self, mesh: DeviceMesh) -> None:
        """The second half of a launched sum: over the replicas of each shard. Call it in one order on all ranks."""
        if self.shared and self.work is not None:
            self.work.wait()
            self.work = None
            self.rows = None
            assert self.result is not None
            self.work = self._sum(self.result, mesh)

    def finish(self) -> list[Slot]:
        """Wait for the sum; returns the slots of which any rank had a gradient."""
        flags = self.flags()
        return self.slots if flags is None else [slot for slot in self.slots if flags[slot.position] > 0]

    def flags(self) -> list[float] | None:
        """How many ranks had a gradient of each slot and guest; None where this rank had them all."""
        if self.work is not None:
            self.work.wait()
        if self.complete:  # reading the flags would make an accelerator's host wait
            return None
        row = self.buffer()[0] if self.result is None else self.result
        return row[self.numel :].tolist()  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forget the pass; a sum still in flight ends first, since its buffer goes."""
        if self.work is not None:
            self.work.wait()
        if self.again and self.lent:  # not in a pass that adds to gradients: those lie in the one before
            self.before = self.rows
        self.rows, self.result, self.work, self.lent = None, None, None, False
        self.arrived.clear()
        self.views.clear()

    def _filled(self) -> torch.Tensor:
        """The buffer, zero where nothing has arrived, with the flags behind."""
        rows = self.buffer()
        flags = rows[:, self.numel :]
        flags.fill_(1)
        if self.complete:
            return rows
        for slot in self.slots:
            if slot.position not in self.arrived:
                rows[:, slot.offset : slot.offset + slot.numel].zero_()
                flags[:, slot.position] = 0
        for place in self.guests.values():
            if place not in self.arrived:
                flags[:, place] = 0
        return rows

    def _sum(self, row: torch.Tensor, mesh: DeviceMesh) -> dist.Work | None:
        if not self.axes:
            return None
        nbytes = row.numel() * row.element_size()
        record("all_reduce", "+".join(self.axes), nbytes, "backward", function="data", why="X->I")
        return dist.all_reduce(row, group=group_over(mesh, self.axes), async_op=True)


@dataclass
class Single(Bucket):
    """One large gradient, summed where autograd has left it; copied only where someone else sees that memory too.

    Attributes:
        host: the bucket with which its flag travels.
    """

    host: Bucket | None = None

    def put(self, slot: Slot, gradient: torch.Tensor) -> None:
        """See Bucket."""
        assert self.host is not None
        count = gradient.numel()
        if gradient.stride() == slot.strides and just_accumulated(gradient):
            flat = gradient.as_strided((count,), (1,), gradient.storage_offset())
        else:
            flat = torch.empty(count, dtype=self.dtype, device=self.device)
            flat.as_strided(gradient.shape, slot.strides).copy_(gradient)
        self.rows = flat.view(self.count, -1)
        self.arrived.add(0)
        self.host.arrived.add(self.host.guests[slot.index])

    def finish(self) -> list[Slot]:
        """See Bucket."""
        if self.work is not None:
            self.work.wait()
        if self.arrived:
            return self.slots
        assert self.host is not None
        flags = self.host.flags()
        return self.slots if flags is None or flags[self.host.guests[self.slots[0].index]] > 0 else []

    def _filled(self) -> torch.Tensor:
        if self.rows is None:
            self.rows = torch.zeros(self.count, self.numel, dtype=self.dtype, device=self.device)
        return self.rows


@dataclass(frozen=True)
class Filling:
    """When a bucket is full.

    Attributes:
        nbytes: bytes of gradients at which a bucket is launched, where they are not shared: those have one per unit.
        single: bytes from which a gradient is summed alone; None: see `single_bytes`.
        again: see Bucket; only on a CPU, and where ranks do not share the gradients.
    """

    nbytes: int
    single: int | None = None
    again: bool = False

    def alone(self, slot: Slot) -> bool:
        """Whether a slot has a collective of its own."""
        least = single_bytes(slot.holder.device, bool(slot.shared)) if self.single is None else self.single
        return slot.in_rows and slot.numel * slot.holder.dtype.itemsize >= least


def make_buckets(slots: Sequence[Slot], filling: Filling) -> list[Bucket]:
    """Fill buckets with `slots` in the order given, and tell each slot its place.

    A bucket holds one dtype, one device and one set of axes. The buckets come in the order in which they fill up, which
    is the order of their launch.
    """
    left: dict[tuple[object, ...], int] = {}
    for slot in slots:
        left[_key(slot)] = left.get(_key(slot), 0) + 1
    closed: list[Bucket] = []
    opened: dict[tuple[object, ...], Bucket] = {}
    singles: dict[tuple[object, ...], list[Single]] = {}
    for slot in slots:
        key = _key(slot)
        left[key] -= 1
        if filling.alone(slot):
            # its memory is whatever autograd brings
            single = _bucket(Single, slot, replace(filling, again=False))
            single.add(slot)
            closed.append(single)
            singles.setdefault(key, []).append(single)
        else:
            if key not in opened:
                opened[key] = _bucket(Bucket, slot, filling)
            opened[key].add(slot)
        bucket = opened.get(key)
        if not left[key] and key in singles:  # the last one takes the flags of all that go alone
            bucket = bucket or _bucket(Bucket, slot, filling)
            for single in singles[key]:
                single.host = bucket
                bucket.guests[single.slots[0].index] = len(bucket.slots) + len(bucket.guests)
        if bucket is None:
            continue
        full = not bucket.shared and bucket.numel * bucket.dtype.itemsize >= filling.nbytes
        if full or not left[key]:
            closed.append(bucket)
            opened.pop(key, None)
    for number, bucket in enumerate(closed):
        for slot in bucket.slots:
            slot.bucket = number
    return closed


def _bucket(kind: type[_Kind], slot: Slot, filling: Filling) -> _Kind:
    """An empty one for a slot and its like."""
    count, device = 1 if slot.shards is None else slot.shards.count, slot.holder.device
    again = filling.again and device.type == "cpu" and not slot.shared
    return kind(slot.axes, slot.shared, count, slot.holder.dtype, device, again)


def _key(slot: Slot) -> tuple[object, ...]:
    return (slot.axes, slot.shared, slot.unit if slot.shared else -1, slot.holder.dtype, slot.holder.device)


def agreed_order(order: Sequence[int], mesh: DeviceMesh, axes: Axes, device: torch.device) -> list[int]:
    """The `order` of the first rank along `axes`, on every rank: unlike buckets would mix tensors in a sum."""
    told = torch.tensor(order, dtype=torch.int64, device=device)
    group = group_over(mesh, axes)
    dist.broadcast(told, src=dist.get_global_rank(group, 0), group=group)
    return [int(index) for index in told.tolist()]
