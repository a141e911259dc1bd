"""Gradient buckets: gradients that are reduced over the same axes by one collective.

A bucket is one flat buffer: the gradients, then one flag per parameter, 1 where this rank had a gradient. After the sum a flag
above zero says that SOME rank had one, so all ranks agree on which gradients stay None.

Gradients of sharded parameters form one row per rank of the shard axis. A reduce-scatter leaves each rank the sum of its row,
which is then all-reduced over the axes of replicas.

A large gradient is reduced in place by a collective of its own (`Single`), without a copy. Its flag is in a bucket of the same
kind. If one rank owns the parameter, the sum goes to that rank alone (`Owned`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices import on_host
from meshwright_dtensor.devices.waits import wait_for
from meshwright_dtensor.mesh.mesh import group_over, message_device
from meshwright_parallel._torch.core import is_only_user, is_only_user_after_accumulation, local_of
from meshwright_parallel.engine.flat_shards import Shards, row_starts, single_bytes

Axes = tuple[str, ...]
_Kind = TypeVar("_Kind", bound="Bucket")


@dataclass
class Slot:
    """One parameter and its place in a bucket.

    Attributes:
        name: fully qualified name, for messages.
        leaf: the tensor at which autograd accumulates: plain, or a stock DTensor.
        axes: mesh axes over which its gradient is partial, without the shard axis.
        stored: the tensor whose `.grad` gets the sum: the leaf, or the stored parameter of which the leaf is a compute copy.
        shard_axis: the axis along which `stored` is a shard of the leaf, "" where there is none.
        group: parameter group; sharded gradients of one group and dtype make one bucket.
        index: its place among the slots of the engine.
        bucket, position, offset: number of its bucket, its place there, its first element there.
        starts: of a sharded one, the first element of each rank's part in its row.
    """

    name: str
    leaf: torch.Tensor
    axes: Axes
    stored: torch.Tensor
    shard_axis: str = ""
    shards: Shards | None = None
    group: int = -1
    index: int = 0
    bucket: int = -1
    position: int = 0
    offset: int = 0
    starts: tuple[int, ...] = ()

    @cached_property
    def numel(self) -> int:
        """Elements that this rank has of the sum."""
        return local_of(self.stored).numel()

    @cached_property
    def shape(self) -> torch.Size:
        """Shape of this rank's part of the sum."""
        return local_of(self.stored).shape

    @cached_property
    def strides(self) -> tuple[int, ...]:
        """Strides of a new gradient of the leaf: those of the parameter where it is dense."""
        if self.shards is not None:
            return self.shards.strides
        local = local_of(self.stored)
        return local.stride() if local.is_contiguous() else torch.empty_like(local, device="meta").stride()

    @cached_property
    def in_rows(self) -> bool:
        """Whether a gradient of the leaf can be reduced in place: its shards are contiguous, one rank after the other."""
        if self.leaf.dtype != self.stored.dtype or isinstance(self.leaf, DTensor):
            return False
        return self.shards is None or self.shards.in_rows

    @cached_property
    def has_compute_copy(self) -> bool:
        """Whether the gradient arrives at a compute copy of the stored parameter."""
        return self.stored is not self.leaf

    @property
    def all_axes(self) -> Axes:
        """The axes over which the local gradient is partial."""
        return (*self.axes, self.shard_axis) if self.shard_axis else self.axes


@dataclass
class Bucket:
    """Slots reduced together, and the state of their reduction in the current backward pass.

    Attributes:
        axes: axes of the all-reduce.
        shard_axis, count: axis of the reduce-scatter and its size; "" and 1 where there is none.
        dtype: of the sums and of the stored parameters.
        reuse: reuse the buffer of the last step when no gradient uses it any more; on a CPU new memory is slow.
        flag_slots: index of a slot that is reduced alone -> position of its flag.
        previous: the buffer of the last step, for `reuse`.
        in_gradients: gradients are views of this pass's buffer.
        views: position -> view of the buffer, in this pass.
    """

    axes: Axes
    shard_axis: str
    count: int
    dtype: torch.dtype
    device: torch.device
    reuse: bool = False
    slots: list[Slot] = field(default_factory=list)
    flag_slots: dict[int, int] = field(default_factory=dict)
    numel: int = 0
    arrived: set[int] = field(default_factory=set)
    rows: torch.Tensor | None = None
    previous: torch.Tensor | None = None
    in_gradients: bool = False
    result: torch.Tensor | None = None
    work: dist.Work | None = None
    views: dict[int, torch.Tensor] = field(default_factory=dict)

    @cached_property
    def expected(self) -> int:
        """The number of gradients that arrive, also of those that are reduced alone; of a bucket that is filled."""
        return len(self.slots) + len(self.flag_slots)

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient on this rank."""
        return len(self.arrived) == self.expected

    @property
    def width(self) -> int:
        """Elements of a row: gradients, then one flag per slot, also of those that are reduced alone."""
        return self.numel + self.expected

    def add(self, slot: Slot) -> None:
        """Add a slot at the end; where the parts of sharded ones are is known once all are there (`close`)."""
        slot.position, slot.offset = len(self.slots), self.numel
        self.slots.append(slot)
        if slot.shards is None:
            self.numel += slot.numel

    def close(self) -> None:
        """All slots are there."""
        sharded = [(slot, slot.shards) for slot in self.slots if slot.shards is not None]
        starts, width = row_starts([shards for _, shards in sharded])
        for (slot, _), at in zip(sharded, starts, strict=True):
            slot.starts = at
        self.numel += width

    def buffer(self) -> torch.Tensor:
        """The buffer [count, width] of this pass; nobody else uses its memory, since gradients become views of it."""
        if self.rows is None and self.previous is not None and is_only_user(self.previous):
            self.rows = self.previous
        if self.rows is None:
            self.rows = torch.empty(self.count, self.width, dtype=self.dtype, device=self.device)
        return self.rows

    def view(self, slot: Slot) -> torch.Tensor:
        """The view of the buffer for a slot's summed gradient, with the strides of a new gradient."""
        if slot.shards is not None:
            row = self.buffer()[0] if self.result is None else self.result
            return slot.shards.in_row(row[slot.starts[slot.shards.rank] :])
        view = self.views.get(slot.position)
        if view is None:
            rows = self.buffer()
            view = rows.as_strided(slot.shape, slot.strides, rows.storage_offset() + slot.offset)
            self.views[slot.position] = view
        return view

    def view_as_gradient(self, slot: Slot) -> torch.Tensor:
        """The same view, for use as `.grad` after the pass."""
        self.in_gradients = True
        return self.view(slot)

    def put(self, slot: Slot, gradient: torch.Tensor) -> None:
        """Copy a local gradient into the buffer."""
        if slot.shards is None:
            self.view(slot).copy_(gradient)
        else:
            for row, part in slot.shards.pairs(self.buffer(), slot.starts, gradient):
                row.copy_(part)
        self.arrived.add(slot.position)

    def launch(self, mesh: DeviceMesh) -> None:
        """Start the collective and return; gradients that have not arrived count as zero."""
        rows = self._filled()
        if self.shard_axis:
            self.result = torch.empty(rows.shape[1], dtype=self.dtype, device=self.device)
            record("reduce_scatter", self.shard_axis, rows.nbytes, "backward", function="zero", why="X->S")
            group = mesh.get_group(self.shard_axis)
            self.work = dist.reduce_scatter_single(self.result, rows.view(-1), group=group, async_op=True)
        else:
            self.work = self._sum(rows[0], mesh)

    def advance(self, mesh: DeviceMesh) -> None:
        """After the reduce-scatter, all-reduce over the replicas. All ranks must call it in the same order."""
        if self.shard_axis and self.work is not None:
            wait_for(self.work)
            self.work = None
            self.rows = None
            assert self.result is not None
            self.work = self._sum(self.result, mesh)

    def finish(self) -> list[Slot]:
        """Wait for the sum; returns the slots that have a gradient on any rank."""
        flags = self.flags()
        return self.slots if flags is None else [slot for slot in self.slots if flags[slot.position] > 0]

    def flags(self) -> list[float] | None:
        """Number of ranks that had a gradient, per flag; None where this rank had all gradients."""
        wait_for(self.work)
        # reading the flags would make the host wait for an accelerator
        if self.complete:
            return None
        row = self.buffer()[0] if self.result is None else self.result
        return row[self.numel :].tolist()  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Forget the pass, after waiting for a sum in flight, which uses the buffer."""
        wait_for(self.work)
        # a pass that adds to existing gradients leaves them in the earlier buffer
        if self.reuse and self.in_gradients:
            self.previous = self.rows
        self.rows, self.result, self.work, self.in_gradients = None, None, None, False
        self.arrived.clear()
        self.views.clear()

    def _filled(self) -> torch.Tensor:
        """The buffer with flags, and with zeros for gradients that have not arrived."""
        rows = self.buffer()
        flags = rows[:, self.numel :]
        flags.fill_(1)
        if self.complete:
            return rows
        for slot in self.slots:
            if slot.position not in self.arrived:
                if slot.shards is None:
                    rows[:, slot.offset : slot.offset + slot.numel].zero_()
                else:
                    for start, size, row in zip(slot.starts, slot.shards.sizes, rows, strict=True):
                        row[start : start + size].zero_()
                flags[:, slot.position] = 0
        for place in self.flag_slots.values():
            if place not in self.arrived:
                flags[:, place] = 0
        return rows

    def _sum(self, row: torch.Tensor, mesh: DeviceMesh) -> dist.Work | None:
        # the other ranks of a gradient with one owner have nothing
        if not self.axes or not row.numel():
            return None
        record("all_reduce", "+".join(self.axes), row.nbytes, "backward", function="data", why="X->I")
        return dist.all_reduce(row, group=group_over(mesh, self.axes), async_op=True)


@dataclass
class Single(Bucket):
    """One large gradient, reduced in autograd's memory, and copied only if that is used elsewhere. `flag_bucket`: has its flag."""

    flag_bucket: Bucket | None = None

    def put(self, slot: Slot, gradient: torch.Tensor) -> None:
        assert self.flag_bucket is not None
        count = gradient.numel()
        there = gradient.stride() == slot.strides and gradient.dtype == self.dtype
        if there and is_only_user_after_accumulation(gradient):
            flat = gradient.as_strided((count,), (1,), gradient.storage_offset())
        else:
            flat = torch.empty(count, dtype=self.dtype, device=self.device)
            flat.as_strided(gradient.shape, slot.strides).copy_(gradient)
        self.rows = flat.view(self._rows_shape)
        self.arrived.add(0)
        self.flag_bucket.arrived.add(self.flag_bucket.flag_slots[slot.index])

    def finish(self) -> list[Slot]:
        wait_for(self.work)
        if self.arrived:
            return self.slots
        assert self.flag_bucket is not None
        flags, place = self.flag_bucket.flags(), self.flag_bucket.flag_slots[self.slots[0].index]
        return self.slots if flags is None or flags[place] > 0 else []

    def _filled(self) -> torch.Tensor:
        if self.rows is None:
            self.rows = torch.zeros(self._rows_shape, dtype=self.dtype, device=self.device)
        return self.rows

    @property
    def _rows_shape(self) -> tuple[int, int]:
        return self.count, self.numel


@dataclass
class Owned(Single):
    """One large gradient whose sum goes to the rank that owns the parameter, where it stays in autograd's memory."""

    def launch(self, mesh: DeviceMesh) -> None:
        shards, row = self.slots[0].shards, self._filled()[0]
        assert shards is not None and shards.owner is not None
        record("reduce", self.shard_axis, row.nbytes, "backward", function="zero", why="X->S")
        group = mesh.get_group(self.shard_axis)
        self.work = dist.reduce(row, group_dst=shards.owner, group=group, async_op=True)
        self.result = row if shards.rank == shards.owner else row.new_empty(0)

    @property
    def _rows_shape(self) -> tuple[int, int]:
        return 1, self.numel


@dataclass(frozen=True)
class BucketSizes:
    """Sizes of buckets.

    Attributes:
        nbytes: bytes at which a bucket is reduced. Sharded gradients have one bucket per parameter group instead.
        single: bytes from which a gradient is reduced alone; None: see `single_bytes`.
        reuse: see Bucket; only on a CPU, and for gradients that are not sharded.
    """

    nbytes: int
    single: int | None = None
    reuse: bool = False

    def kind(self, slot: Slot) -> type[Single] | None:
        """How a slot is reduced if it is reduced alone."""
        if slot.shards is not None and slot.shards.is_owned_alone(slot.stored.dtype):
            return Owned
        return Single if self.is_single(slot) else None

    def is_single(self, slot: Slot) -> bool:
        """Whether a slot is reduced alone, in parts of all ranks."""
        sharded = bool(slot.shard_axis)
        least = single_bytes(slot.stored.device, sharded) if self.single is None else self.single
        return slot.in_rows and slot.numel * slot.stored.dtype.itemsize >= least


def make_buckets(slots: Sequence[Slot], sizes: BucketSizes) -> list[Bucket]:
    """Fill buckets with `slots` in this order, and set each slot's place.

    A bucket has one dtype, one device and one set of axes. The buckets are returned in the order in which they fill up, which
    is the order of their collectives.
    """
    left = Counter(map(_key, slots))
    closed: list[Bucket] = []
    opened: dict[tuple[object, ...], Bucket] = {}
    singles: dict[tuple[object, ...], list[Single]] = {}
    for slot in slots:
        key = _key(slot)
        left[key] -= 1
        alone = sizes.kind(slot)
        if alone is not None:
            # its memory is autograd's, so there is none to reuse
            single = _bucket(alone, slot, replace(sizes, reuse=False))
            single.add(slot)
            closed.append(single)
            singles.setdefault(key, []).append(single)
        else:
            if key not in opened:
                opened[key] = _bucket(Bucket, slot, sizes)
            opened[key].add(slot)
        bucket = opened.get(key)
        # the last bucket of a kind has the flags of its singles
        if not left[key] and key in singles:
            bucket = bucket or _bucket(Bucket, slot, sizes)
            for single in singles[key]:
                single.flag_bucket = bucket
                bucket.flag_slots[single.slots[0].index] = len(bucket.slots) + len(bucket.flag_slots)
        if bucket is None:
            continue
        full = not bucket.shard_axis and bucket.numel * bucket.dtype.itemsize >= sizes.nbytes
        if full or not left[key]:
            closed.append(bucket)
            opened.pop(key, None)
    for number, bucket in enumerate(closed):
        bucket.close()
        for slot in bucket.slots:
            slot.bucket = number
    return closed


def _bucket(kind: type[_Kind], slot: Slot, sizes: BucketSizes) -> _Kind:
    """An empty bucket for slots of this kind."""
    count, device = 1 if slot.shards is None else slot.shards.count, slot.stored.device
    again = sizes.reuse and on_host(device) and not slot.shard_axis
    return kind(slot.axes, slot.shard_axis, count, slot.stored.dtype, device, again)


def _key(slot: Slot) -> tuple[object, ...]:
    group = slot.group if slot.shard_axis else -1
    return slot.axes, slot.shard_axis, group, slot.stored.dtype, slot.stored.device


def broadcast_order(order: Sequence[int], mesh: DeviceMesh, axes: Axes) -> list[int]:
    """The `order` of the first rank along `axes`, on every rank: all ranks must fill equal buckets."""
    group = group_over(mesh, axes)
    # not where the gradients are, if that would make the host wait for an accelerator
    indices = torch.tensor(order, dtype=torch.int64, device=message_device(group))
    dist.broadcast(indices, src=dist.get_global_rank(group, 0), group=group)
    return [int(index) for index in indices.tolist()]
