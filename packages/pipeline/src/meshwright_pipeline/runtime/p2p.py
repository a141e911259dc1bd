"""Messages between stages: the local parts of what crosses a cut, and of its gradients.

The first message of a step over a cut says how everything lies; those that follow are bare tensors in buffers of known shape.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.comm.log import record
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, wrap

Tensor = torch.Tensor
_ANNOUNCED = 1 << 30
_HEAD = 1024
"""Bytes of the message that begins an announcement: its length, and as much of it as has room."""


@dataclass(frozen=True)
class Crossing:
    """How one value lies: its local shape and dtype; over a mesh, its states and global shape; whether it has a gradient."""

    local_shape: tuple[int, ...]
    dtype: torch.dtype
    states: States | None
    shape: tuple[int, ...]
    differentiable: bool

    @staticmethod
    def of(value: Tensor) -> Crossing:
        """That of a value."""
        if isinstance(value, GlobalTensor):
            layout, local = value.global_layout, value.to_local()
            return Crossing(
                tuple(local.shape), local.dtype, layout.states, tuple(layout.shape), local.requires_grad
            )
        return Crossing(tuple(value.shape), value.dtype, None, tuple(value.shape), value.requires_grad)

    def empty(self, device: torch.device) -> Tensor:
        """A buffer for the local part, or for its gradient."""
        return torch.empty(self.local_shape, dtype=self.dtype, device=device)

    def value(self, local: Tensor, mesh: DeviceMesh | None) -> Tensor:
        """The value of which `local` is this rank's part."""
        if self.states is None or mesh is None:
            return local
        context = MeshContext.of(mesh)
        return wrap(local, layout_of(context, self.states, self.shape, self.dtype))


Wire = tuple[Crossing, ...]


class Broken(Exception):
    """The stage at the other end has failed before it could say what it sends."""


class Transport:
    """Messages along the axis of the pipeline.

    Args:
        group: the ranks of the axis.
        device: where tensors are.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank = dist.get_rank(group)
        self._sent: list[Sent] = []

    def announce(self, letter: bytes | None, peer: int, cut: int, place: int) -> None:
        """Say how what follows in this step lies; None: nothing will come. `place` as in `send`."""
        content = letter or b""
        head = bytearray(len(content).to_bytes(8, "little") + content[: _HEAD - 8]).ljust(_HEAD, b"\0")
        tag = _ANNOUNCED + 2 * cut
        self._post(torch.frombuffer(head, dtype=torch.uint8).to(self.device), peer, tag, place)
        if len(content) > _HEAD - 8:
            rest = bytearray(content[_HEAD - 8 :])
            self._post(torch.frombuffer(rest, dtype=torch.uint8).to(self.device), peer, tag + 1, place)

    def hear(self, peer: int, cut: int) -> bytes:
        """What the peer announces.

        Raises:
            Broken: nothing will come.
        """
        tag = _ANNOUNCED + 2 * cut
        head = self._bytes(_HEAD, peer, tag)
        length = int.from_bytes(head[:8], "little")
        if not length:
            raise Broken
        rest = self._bytes(length - _HEAD + 8, peer, tag + 1) if length > _HEAD - 8 else b""
        return (head[8:] + rest)[:length]

    def _bytes(self, count: int, peer: int, tag: int) -> bytes:
        content = torch.empty(count, dtype=torch.uint8, device=self.device)
        dist.recv(content, group=self.group, group_src=peer, tag=tag)
        return content.cpu().numpy().tobytes()

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int, phase: Any, place: int) -> None:
        """Send tensors, which must not be written to any more.

        Args:
            place: of the action that takes them, in the order of the peer's actions.
        """
        for number, tensor in enumerate(tensors):
            contiguous = tensor.detach().contiguous()
            nbytes = contiguous.numel() * contiguous.element_size()
            record("send_recv", "pp", nbytes, phase, function="pipeline")
            self._post(contiguous, peer, tag + number, place)

    def receive(self, wire: Wire, peer: int, tag: int) -> Arriving:
        """Start to receive what lies as `wire` says."""
        buffers = [one.empty(self.device) for one in wire]
        works = [
            dist.irecv(buffer, group=self.group, group_src=peer, tag=tag + place)
            for place, buffer in enumerate(buffers)
        ]
        return Arriving(buffers, works)

    def taken(self, peer: int, place: int) -> None:
        """The peer has come to this place: what was sent for actions up to there has arrived, and is kept no longer.

        Works of gloo do not know by themselves that they have ended.
        """
        for sent in self._sent:
            if sent.peer == peer and sent.place <= place and sent.work is not None:
                sent.work.wait()
        self._sent = [sent for sent in self._sent if sent.peer != peer or sent.place > place]

    def settle(self, gone: Collection[int]) -> tuple[Sent, RuntimeError] | None:
        """Wait until everything that was sent has left, but for what peers that are `gone` do not take.

        Returns: the first message that could not leave, and why; None where all have.
        """
        sent, self._sent = self._sent, []
        lost: tuple[Sent, RuntimeError] | None = None
        dead = set(gone)
        for one in sent:
            if one.work is None or one.peer in dead:
                continue
            try:
                one.work.wait()
            except RuntimeError as error:  # the others still wait for what was sent to them
                dead.add(one.peer)
                lost = lost or (one, error)
        return lost

    def _post(self, tensor: Tensor, peer: int, tag: int, place: int) -> None:
        work = dist.isend(tensor, group=self.group, group_dst=peer, tag=tag)
        self._sent.append(Sent(peer, place, work, tensor))


@dataclass(frozen=True)
class Sent:
    """A message on its way to an action of a peer (its place in the peer's order), and the memory that it is sent from."""

    peer: int
    place: int
    work: dist.Work | None
    tensor: Tensor


@dataclass
class Arriving:
    """Tensors on their way."""

    buffers: list[Tensor]
    works: Sequence[dist.Work | None]

    def wait(self) -> list[Tensor]:
        """The tensors, arrived."""
        for work in self.works:
            if work is not None:
                work.wait()
        return self.buffers
