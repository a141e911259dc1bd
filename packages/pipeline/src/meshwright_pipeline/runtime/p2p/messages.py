"""Point-to-point messages along the pipeline axis: byte messages, and the tensors that cross a cut.

In each step the first message over a cut is a header that describes the tensors. The tensors follow without
any description, in buffers of known shape.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.devices.waits import wait_for
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.mesh.mesh import message_device
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, wrap
from meshwright_pipeline.runtime.p2p.channels import Channel

Tensor = torch.Tensor
_HEADERS = 1 << 30
_MOST = 1 << 16
"""More microbatches than any step has."""
_GRADIENT_HEADERS = _HEADERS + 2 * _MOST
_PACKET = 1024
"""Bytes of the first packet of a byte message: its length, and as much of it as fits."""


@dataclass(frozen=True)
class TensorSpec:
    """Describes one tensor that crosses a cut.

    Attributes:
        local_shape, dtype: of this rank's part.
        states, shape: the placement over the mesh of the stage, None for an ordinary tensor; the global shape.
        differentiable: whether a gradient comes back.
        dim_order: the dims in memory, outermost first. A stage receives the memory order of one device: random numbers are
            drawn in it.
    """

    local_shape: tuple[int, ...]
    dtype: torch.dtype
    states: States | None
    shape: tuple[int, ...]
    differentiable: bool
    dim_order: tuple[int, ...]

    @staticmethod
    def of(value: Tensor) -> TensorSpec:
        """The description of `value`."""
        if isinstance(value, GlobalTensor):
            layout, local = value.global_layout, value.to_local()
            states, shape = layout.states, tuple(layout.shape)
        else:
            local, states, shape = value, None, tuple(value.shape)
        # the stride of a dim of one element says nothing
        order = sorted(dim_order_of(local), key=lambda dim: local.shape[dim] != 1)
        return TensorSpec(tuple(local.shape), local.dtype, states, shape, local.requires_grad, tuple(order))

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for this rank's part, or for its gradient."""
        if self.in_order:
            return torch.empty(self.local_shape, dtype=self.dtype, device=device)
        strides = dense_strides(self.local_shape, self.dim_order)
        return torch.empty_strided(self.local_shape, strides, dtype=self.dtype, device=device)

    @cached_property
    def in_order(self) -> bool:
        """Whether the dims are in memory as they are numbered."""
        return self.dim_order == tuple(range(len(self.dim_order)))

    def contiguous(self, local: Tensor) -> Tensor:
        """What is sent of this rank's part; of a buffer it is a view."""
        if self.in_order:
            return local.detach().contiguous()
        return local.detach().permute(self.dim_order).contiguous()

    def unpacked(self, sent: Tensor) -> Tensor:
        """The part of which `sent` is `contiguous`, a view."""
        return sent.permute(sorted(range(sent.dim()), key=self.dim_order.__getitem__))

    def value(self, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """The tensor that has `local` as this rank's part."""
        if self.states is None or mesh is None:
            return local
        return wrap(local, layout_of(MeshContext.of(mesh), self.states, self.shape, self.dtype))


Specs = tuple[TensorSpec, ...]


class NothingComes(Exception):
    """The stage at the other end failed before it could describe its tensors."""


# ---- one tensor
def isend(tensor: Tensor, group: dist.ProcessGroup, peer: int, tag: int) -> dist.Work | None:
    """Start to send a dense real tensor to rank `peer` of `group`.

    `torch.distributed.isend` would ask for the default group too, which shows the code of a model one device: its frames are
    then walked for every message.
    """
    return group.send([tensor], peer, tag)


def irecv(buffer: Tensor, group: dist.ProcessGroup, peer: int, tag: int) -> dist.Work | None:
    """Start to receive into a dense real tensor; see `isend`."""
    return group.recv([buffer], peer, tag)


# ---- byte messages
def packets(content: bytes, tag: int, device: torch.device) -> list[tuple[int, Tensor]]:
    """(tag, tensor) to send for a byte message: one of 1 KB, and a second one where the content is longer."""
    first = _PACKET - 8
    head = bytearray(len(content).to_bytes(8, "little") + content[:first]).ljust(_PACKET, b"\0")
    parts = [head, bytearray(content[first:])] if len(content) > first else [head]
    return [(tag + i, torch.frombuffer(part, dtype=torch.uint8).to(device)) for i, part in enumerate(parts)]


def receive_bytes(group: dist.ProcessGroup, peer: int, tag: int) -> Callable[[], bytes]:
    """Start to receive a byte message. The function that is returned waits for its content."""
    device = message_device(group)
    head = torch.empty(_PACKET, dtype=torch.uint8, device=device)
    work = irecv(head, group, peer, tag)

    def content() -> bytes:
        wait_for(work)
        data = _bytes_of(head)
        length = int.from_bytes(data[:8], "little")
        if length > _PACKET - 8:
            rest = torch.empty(length - _PACKET + 8, dtype=torch.uint8, device=device)
            wait_for(irecv(rest, group, peer, tag + 1))
            data += _bytes_of(rest)
        return data[8 : 8 + length]

    return content


def send_to_each(
    tensors: Sequence[tuple[int, Tensor]], ranks: Iterable[int], group: dist.ProcessGroup
) -> dict[int, RuntimeError]:
    """Send the same tensors, each with its tag, to several ranks. Returns the ranks that did not receive them, and why."""
    works: list[tuple[int, dist.Work | None]] = []
    lost: dict[int, RuntimeError] = {}
    for rank in ranks:
        try:
            for tag, tensor in tensors:
                works.append((rank, isend(_real(tensor), group, rank, tag)))
        except RuntimeError as error:
            lost[rank] = error
    for rank, work in works:
        if work is None or rank in lost:
            continue
        try:
            wait_for(work)
        except RuntimeError as error:
            lost[rank] = error
    return lost


def _header_tag(channel: Channel, microbatch: int) -> int:
    cut, backward = channel
    return _HEADERS + 2 * cut if not backward else _GRADIENT_HEADERS + 2 * (cut * _MOST + microbatch)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.to(HOST).numpy().tobytes()


# ---- messages of actions
class Transport:
    """Messages of the actions of a step, along the pipeline axis.

    `groups`: see `channels`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        groups: Mapping[Channel, dist.ProcessGroup] = MappingProxyType({}),
    ) -> None:
        self.group, self.device, self.groups = group, device, groups
        self.rank = dist.get_rank(group)
        self._sent: list[Sent] = []

    def send_header(
        self, content: bytes | None, peer: int, channel: Channel, place: int, microbatch: int = 0
    ) -> None:
        """Send the header of a cut; None: nothing will come over it. `place`: see `send`."""
        first = _header_tag(channel, microbatch)
        for tag, packet in packets(content or b"", first, message_device(self.group)):
            self._isend(packet, self.group, peer, tag, place)

    def receive_header(self, peer: int, channel: Channel, microbatch: int = 0) -> bytes:
        """The header of a cut. Raises NothingComes: nothing will come over it."""
        content = receive_bytes(self.group, peer, _header_tag(channel, microbatch))()
        if not content:
            raise NothingComes
        return content

    def send(
        self,
        tensors: Sequence[Tensor],
        specs: Specs,
        peer: int,
        channel: Channel,
        tag: int,
        place: int,
    ) -> None:
        """Send tensors, not to be written to any more. `place`: index, among the peer's actions, of the action that takes them."""
        for number, (tensor, spec) in enumerate(zip(tensors, specs, strict=True)):
            contiguous = spec.contiguous(tensor)
            phase = "backward" if channel[1] else "forward"
            record("send_recv", "pp", contiguous.nbytes, phase, function="pipeline")
            self._isend(contiguous, self.groups.get(channel, self.group), peer, tag + number, place)

    def receive(self, specs: Specs, peer: int, channel: Channel, tag: int) -> Callable[[], list[Tensor]]:
        """Start to receive tensors of these descriptions. The function that is returned waits for them."""
        group = self.groups.get(channel, self.group)
        buffers = [spec.empty(self.device) for spec in specs]
        works = [
            irecv(_real(spec.contiguous(buffer)), group, peer, tag + number)
            for number, (spec, buffer) in enumerate(zip(specs, buffers, strict=True))
        ]

        def tensors() -> list[Tensor]:
            for work in works:
                wait_for(work)
            return buffers

        return tensors

    def release_sent(self, peer: int, place: int) -> None:
        """Free what was sent for the peer's actions up to `place`: the peer has run them, so it has arrived.

        Works of gloo have to be waited for; they do not notice by themselves that they have ended.
        """
        for sent in self._sent:
            if sent.peer == peer and sent.place <= place:
                wait_for(sent.work)
        self._sent = [sent for sent in self._sent if sent.peer != peer or sent.place > place]

    def flush(self, lost_ranks: Collection[int]) -> tuple[Sent, RuntimeError] | None:
        """Wait until all messages have left, except those to `lost_ranks`. Returns the first that could not leave, and why."""
        pending, self._sent = self._sent, []
        first: tuple[Sent, RuntimeError] | None = None
        dead = set(lost_ranks)
        for sent in pending:
            if sent.work is None or sent.peer in dead:
                continue
            try:
                wait_for(sent.work)
            except RuntimeError as error:
                # the other ranks still wait for their messages
                dead.add(sent.peer)
                first = first or (sent, error)
        return first

    def _isend(self, tensor: Tensor, group: dist.ProcessGroup, peer: int, tag: int, place: int) -> None:
        work = isend(_real(tensor), group, peer, tag)
        self._sent.append(Sent(peer, place, work, tensor))


@dataclass(frozen=True)
class Sent:
    """A message on its way to an action of a peer (index among the peer's actions), and its memory."""

    peer: int
    place: int
    work: dist.Work | None
    tensor: Tensor
