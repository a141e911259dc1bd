"""Connections between the ranks of one machine: sockets for messages, shared memory for the bytes that one rank reads for others.

The memory has no name and the sockets are abstract, so nothing remains after a process ends. If a rank dies, the others
see its socket close. This needs Linux. Elsewhere each rank reads alone.
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
from pathlib import Path

import torch

from meshwright_checkpoint.io.host_memory import shared_memory
from meshwright_checkpoint.rank_messages import Ranks

CONNECT_TIMEOUT = 10.0
"""Seconds to wait for a connection to a rank of the same machine."""
_HEAD = struct.Struct("<cIQ")
READY, FREE, FAILED, DRAINED, BYE, WANTS = b"r", b"f", b"x", b"o", b"b", b"w"
"""Kinds of messages: a chunk is in a slot; the receiver has copied a slot; the sender failed; all chunks that the sender read
were copied; the sender needs nothing more; the byte ranges that the sender wants.
"""


Message = tuple[bytes, int, int, bytes]
"""A message to another rank: its kind, two numbers, and data, of which the second number is then the length."""


class PeerSocket:
    """A socket to another rank of this machine. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, kind: bytes, first: int = 0, second: int = 0, data: bytes = b"") -> None:
        """Send a message. A closed socket is ignored here: the receiving thread reports it."""
        head = _HEAD.pack(kind, first, len(data) or second)
        with suppress(OSError), self._sending:
            self._socket.sendall(head + data)

    def receive(self) -> Message | None:
        """The next message; None if the other rank closed the socket."""
        head = self._receive_exactly(_HEAD.size)
        if head is None:
            return None
        kind, first, second = _HEAD.unpack(head)
        data = self._receive_exactly(second) if kind in (FAILED, WANTS) else b""
        return None if data is None else (kind, first, second, data)

    def shut_down(self) -> None:
        """End the connection. Receivers on both sides get None."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive_exactly(self, nbytes: int) -> bytes | None:
        received = bytearray()
        with suppress(OSError):
            while left := nbytes - len(received):
                some = self._socket.recv(min(left, 1 << 20))
                if not some:
                    return None
                received += some
            return bytes(received)
        return None


@dataclass(frozen=True)
class NodePeers:
    """The ranks of this machine, numbered as members 0 to n-1 in rank order.

    Attributes:
        ranks: the rank of each member.
        me: the member number of this rank.
        sockets: connections to the other members.
        memories: shared memory of each member, as bytes. It puts chunks there for the others.
    """

    ranks: list[int]
    me: int
    sockets: dict[int, PeerSocket]
    memories: dict[int, torch.Tensor]

    def close(self) -> None:
        """Close all connections."""
        for peer in self.sockets.values():
            peer.shut_down()
            peer.close()


def connect_node_peers(ranks: Ranks, what: str, nbytes: Callable[[int], int]) -> NodePeers | None:
    """Connect the ranks of this machine (a collective call). None if there is only one, or if any connection fails.

    Args:
        what: identifies the checkpoint. Only ranks that load the same one are connected.
        nbytes: number of ranks of a machine -> size of each rank's shared memory.
    """
    if ranks.size == 1:
        return None
    listener, address = _listen(what) if sys.platform == "linux" else (None, None)
    try:
        addresses = ranks.gather(address)
        node_ranks = [r for r, other in enumerate(addresses) if address and other and other[0] == address[0]]
        peers = None
        if listener is not None and len(node_ranks) > 1:
            with suppress(OSError, ValueError):
                names = [addresses[r][1] for r in node_ranks]
                me = node_ranks.index(ranks.rank)
                peers = _connect(listener, node_ranks, me, names, nbytes(len(node_ranks)))
        connected = ranks.gather(peers is not None or len(node_ranks) < 2)
    finally:
        if listener is not None:
            listener.close()
    if peers is not None and not all(connected[r] for r in node_ranks):
        peers.close()
        return None
    return peers


def _listen(what: str) -> tuple[socket.socket | None, list[str] | None]:
    """A listening socket; a text that is equal on ranks of one machine that load `what`; and the socket's random name."""
    name = f"meshwright-{uuid.uuid4().hex}"
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()} {what}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(f"\0{name}".encode())
        listener.listen(1024)
        return listener, [machine, name]
    return None, None


def _connect(listener: socket.socket, ranks: list[int], me: int, names: list[str], nbytes: int) -> NodePeers:
    """Connect to all other members and exchange shared memory. Raises OSError or ValueError."""
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
            memories[member] = _receive_memory(sock, nbytes, names, member)[1]
        listener.settimeout(CONNECT_TIMEOUT)
        while len(sockets) < len(ranks) - 1:
            sock, _ = listener.accept()
            sock.settimeout(CONNECT_TIMEOUT)
            try:
                member, peer_memory = _receive_memory(sock, nbytes, names, None)
            except ValueError:
                # a process of another user, or of another run
                sock.close()
                continue
            sockets[member], memories[member] = sock, peer_memory
            socket.send_fds(sock, [hello], [memory])
        for sock in sockets.values():
            sock.settimeout(None)
        peers = {member: PeerSocket(sock) for member, sock in sockets.items()}
        return NodePeers(ranks, me, peers, memories)
    except BaseException:
        for sock in sockets.values():
            sock.close()
        raise
    finally:
        os.close(memory)


def _receive_memory(
    sock: socket.socket, nbytes: int, names: list[str], member: int | None
) -> tuple[int, torch.Tensor]:
    """Member number and memory of the other side. Raises ValueError for a process of another user or run."""
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    data, fds, _, _ = socket.recv_fds(sock, 1 << 12, 1)
    try:
        who, name = json.loads(data)
        other = (member is not None and who != member) or names[who] != name
        if uid != os.getuid() or len(fds) != 1 or other:
            raise ValueError("not a rank of this run")
        return who, shared_memory(fds[0], nbytes)
    except (TypeError, IndexError) as error:
        raise ValueError("not a rank of this run") from error
    finally:
        for fd in fds:
            os.close(fd)
