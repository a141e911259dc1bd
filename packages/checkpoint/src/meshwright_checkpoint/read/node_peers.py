"""The ranks of one machine, joined by sockets and shared memory, so that one of them reads what several want.

The memory has no name and the sockets are abstract: nothing is left behind, however a process ends, and a rank that dies is told
to the others by its socket.  Where a machine has neither (this needs Linux), every rank is alone, and reads for itself.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import torch

from meshwright_checkpoint.io.host_memory import shared_memory
from meshwright_checkpoint.rank_messages import Ranks

CONNECT_TIMEOUT = 10.0
"""Seconds until a rank that has said that it is there counts as unreachable."""
_HEAD = struct.Struct("<cIQ")
READY, FREE, FAILED, DRAINED, BYE, WANTS = b"r", b"f", b"x", b"o", b"b", b"w"
"""Kinds of messages: a portion lies in a slot; a slot has been used; the sender has failed; all that it has read has been used;
it is done with all; what it wants.
"""


@dataclass(frozen=True)
class Message:
    """What one rank tells another: a kind, two numbers (of them the second is the length of `data`, where there is any)."""

    kind: bytes
    first: int
    second: int
    data: bytes = b""


class PeerSocket:
    """A socket to another rank of this machine. Any thread may send, one receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, kind: bytes, first: int = 0, second: int = 0, data: bytes = b"") -> None:
        """Send a message. One that is gone need not be told: who receives on this line will hear why."""
        head = _HEAD.pack(kind, first, len(data) or second)
        with suppress(OSError), self._sending:
            self._socket.sendall(head + data)

    def receive(self) -> Message | None:
        """The next message; None where the other one is gone."""
        head = self._receive_exactly(_HEAD.size)
        if head is None:
            return None
        kind, first, second = _HEAD.unpack(head)
        data = self._receive_exactly(second) if kind in (FAILED, WANTS) else b""
        return None if data is None else Message(kind, first, second, data)

    def shut_down(self) -> None:
        """End the line; who receives on it, here or there, is told."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive_exactly(self, nbytes: int) -> bytes | None:
        received = bytearray()
        while len(received) < nbytes:
            try:
                some = self._socket.recv(min(nbytes - len(received), 1 << 20))
            except OSError:
                return None
            if not some:
                return None
            received += some
        return bytes(received)


class NodePeers:
    """The ranks of this machine, as members 0 to n-1 in the order of ranks.

    Attributes:
        ranks: of each member, its rank.
        me: which member this is.
        lines: to the others.
        memories: of each member, the memory in which it hands out what it has read; bytes.
    """

    def __init__(
        self, ranks: list[int], me: int, lines: dict[int, PeerSocket], memories: dict[int, torch.Tensor]
    ) -> None:
        self.ranks, self.me, self.sockets, self.memories = ranks, me, lines, memories

    def close(self) -> None:
        """Close all lines."""
        for line in self.sockets.values():
            line.shut_down()
            line.close()


def connect_node_peers(ranks: Ranks, what: str, nbytes: Callable[[int], int]) -> NodePeers | None:
    """Join the ranks of this machine (a collective call); None on all of them where a rank cannot be joined, or is alone here.

    Args:
        what: they load; only ranks that load the same are joined.
        nbytes: number of ranks of a machine -> size of the memory that each hands things out in.
    """
    if ranks.size == 1:
        return None
    listener, address = _door(what) if sys.platform == "linux" else (None, None)
    try:
        addresses = ranks.gather(address)
        node_ranks = [r for r, other in enumerate(addresses) if address and other and other[0] == address[0]]
        peers = None
        if listener is not None and len(node_ranks) > 1:
            with suppress(OSError, ValueError):
                peers = _joined(
                    listener,
                    node_ranks,
                    ranks.rank,
                    [addresses[r][1] for r in node_ranks],
                    nbytes(len(node_ranks)),
                )
        connected = ranks.gather(peers is not None or len(node_ranks) < 2)
    finally:
        if listener is not None:
            listener.close()
    if peers is not None and not all(connected[r] for r in node_ranks):
        peers.close()
        return None
    return peers


def _door(what: str) -> tuple[socket.socket | None, list[str] | None]:
    """A socket that listens; text that is equal for `what` on one machine, and the socket's name, which nobody guesses."""
    name = f"meshwright-{uuid.uuid4().hex}"
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()} {what}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}".encode())
        listener.listen(1024)
        return listener, [machine, name]
    return None, None


def _joined(
    listener: socket.socket, node_ranks: list[int], rank: int, names: list[str], nbytes: int
) -> NodePeers:
    """Lines to all others; each sends the other its memory. Raises OSError or ValueError where that fails."""
    me = node_ranks.index(rank)
    memory = os.memfd_create("meshwright-load", os.MFD_CLOEXEC)
    sockets: dict[int, socket.socket] = {}
    try:
        os.ftruncate(memory, nbytes)
        memories = {me: shared_memory(memory, nbytes)}
        hello = json.dumps([me, names[me]]).encode()
        for member in range(me):
            sockets[member] = sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            sock.settimeout(CONNECT_TIMEOUT)
            sock.connect(b"\0" + names[member].encode())
            socket.send_fds(sock, [hello], [memory])
            memories[member] = _received(sock, nbytes, names, member)[1]
        listener.settimeout(CONNECT_TIMEOUT)
        while len(sockets) < len(node_ranks) - 1:
            sock, _ = listener.accept()
            sock.settimeout(CONNECT_TIMEOUT)
            try:
                member, peer_memory = _received(sock, nbytes, names, None)
            except ValueError:  # of another user, or no rank of this run
                sock.close()
                continue
            sockets[member], memories[member] = sock, peer_memory
            socket.send_fds(sock, [hello], [memory])
        for sock in sockets.values():
            sock.settimeout(None)
        return NodePeers(
            node_ranks, me, {member: PeerSocket(sock) for member, sock in sockets.items()}, memories
        )
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise
    finally:
        os.close(memory)


def _received(
    sock: socket.socket, nbytes: int, names: list[str], member: int | None
) -> tuple[int, torch.Tensor]:
    """Who is there, and its memory. Raises ValueError for one that does not belong here."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    data, fds, _, _ = socket.recv_fds(sock, 1 << 12, 1)
    try:
        who, name = json.loads(data)
        if (
            uid != os.getuid()
            or len(fds) != 1
            or (member is not None and who != member)
            or names[who] != name
        ):
            raise ValueError("a stranger")
        return who, shared_memory(fds[0], nbytes)
    except (TypeError, IndexError) as error:
        raise ValueError("a stranger") from error
    finally:
        for fd in fds:
            os.close(fd)
