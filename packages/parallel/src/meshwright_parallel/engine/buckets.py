"""Buckets: gradients that are summed over the same axes by one collective.

A bucket is one flat buffer. Behind the gradients lies one flag per parameter, 1 where this rank had a gradient: after
the sum, a flag above zero says that SOME rank had one, so ranks can never disagree on which gradients stay None.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.commlog import record
from meshwright_dtensor.mesh import group_over
from meshwright_parallel._torch import local_of

Axes = tuple[str, ...]


@dataclass
class Slot:
    """One parameter of the engine and its place in a bucket.

    Attributes:
        name: fully qualified name, for messages.
        leaf: the tensor at which autograd accumulates: plain, or a stock DTensor.
        axes: mesh axes over which its gradient is partial.
        index: its place among the slots of the engine.
        bucket, position, offset: number of its bucket, its place there, its first element there.
    """

    name: str
    leaf: torch.Tensor
    axes: Axes
    index: int = 0
    bucket: int = -1
    position: int = 0
    offset: int = 0

    @property
    def numel(self) -> int:
        """Elements of this rank's part."""
        return local_of(self.leaf).numel()


@dataclass
class Bucket:
    """Slots reduced together, and the state of their reduction in the current backward pass."""

    axes: Axes
    dtype: torch.dtype
    device: torch.device
    slots: list[Slot] = field(default_factory=list)
    numel: int = 0
    arrived: set[int] = field(default_factory=set)
    flat: torch.Tensor | None = None
    work: dist.Work | None = None

    @property
    def complete(self) -> bool:
        """Whether every parameter has delivered its gradient on this rank."""
        return len(self.arrived) == len(self.slots)

    def add(self, slot: Slot) -> None:
        """Give a slot its place."""
        slot.position, slot.offset = len(self.slots), self.numel
        self.slots.append(slot)
        self.numel += slot.numel

    def buffer(self) -> torch.Tensor:
        """The flat buffer [numel + one flag per slot]; new in every pass, since gradients become views of it."""
        if self.flat is None:
            self.flat = torch.empty(self.numel + len(self.slots), dtype=self.dtype, device=self.device)
        return self.flat

    def view(self, slot: Slot) -> torch.Tensor:
        """The part of the buffer that is this slot's gradient, with the strides a fresh gradient would have."""
        local = local_of(slot.leaf)
        if local.is_contiguous():
            return self.buffer()[slot.offset : slot.offset + slot.numel].view(local.shape)
        strides = torch.empty_like(local, device="meta").stride()  # dense, in the parameter's order of dims
        return self.buffer().as_strided(local.shape, strides, slot.offset)

    def put(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        """Take this rank's part of a gradient in; returns where it lies now, and where its sum will lie."""
        view = self.view(slot)
        view.copy_(gradient)
        self.arrived.add(slot.position)
        return view

    def launch(self, mesh: DeviceMesh) -> None:
        """Start the one sum over all axes and return at once; what has not arrived counts as zero."""
        flags = self.buffer()[self.numel :]
        flags.fill_(1)
        for slot in self.slots:
            if slot.position not in self.arrived:
                self.view(slot).zero_()
                flags[slot.position] = 0
        flat = self.buffer()
        axes = "+".join(self.axes)
        record(
            "all_reduce", axes, flat.numel() * flat.element_size(), "backward", function="data", why="X->I"
        )
        self.work = dist.all_reduce(flat, group=group_over(mesh, self.axes), async_op=True)

    def finish(self) -> list[Slot]:
        """Wait for the sum; returns the slots of which any rank had a gradient."""
        if self.work is not None:
            self.work.wait()
        if self.complete:  # reading the flags would make an accelerator's host wait
            return self.slots
        flags = self.buffer()[self.numel :].tolist()
        return [slot for slot in self.slots if flags[slot.position] > 0]

    def reset(self) -> None:
        """Forget the pass; a sum still in flight ends first, since its buffer goes."""
        if self.work is not None:
            self.work.wait()
        self.flat, self.work = None, None
        self.arrived.clear()


def make_buckets(slots: Sequence[Slot], bucket_bytes: int) -> list[Bucket]:
    """Fill buckets with `slots` in the order given, and tell each slot its place.

    A bucket holds one dtype, one device and one set of axes; the gradient that takes it to `bucket_bytes` closes it.
    The buckets come in the order in which they fill up, which is the order of their launch.
    """
    closed: list[Bucket] = []
    filling: dict[tuple[Axes, torch.dtype, torch.device], Bucket] = {}
    for slot in slots:
        key = (slot.axes, slot.leaf.dtype, slot.leaf.device)
        bucket = filling.setdefault(key, Bucket(*key))
        bucket.add(slot)
        if bucket.numel * slot.leaf.dtype.itemsize >= bucket_bytes:
            closed.append(filling.pop(key))
    closed.extend(filling.values())
    for number, bucket in enumerate(closed):
        for slot in bucket.slots:
            slot.bucket = number
    return closed


def agreed_order(order: Sequence[int], mesh: DeviceMesh, axes: Axes, device: torch.device) -> list[int]:
    """The `order` of the first rank along `axes`, on every rank: unlike buckets would mix tensors in a sum."""
    told = torch.tensor(order, dtype=torch.int64, device=device)
    group = group_over(mesh, axes)
    dist.broadcast(told, src=dist.get_global_rank(group, 0), group=group)
    return [int(index) for index in told.tolist()]
