"""Messages between the ranks of one host that build a model together: values of Python, and open files."""

from __future__ import annotations

import os
import pickle
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_HEAD = struct.Struct("<QI")
_FILES = 128
"""Open files that go with one byte; Linux allows 253."""


class ClosedError(Exception):
    """The other side has closed the connection or ended."""


@dataclass
class Channel:
    """A connection to another process of the same user. One thread uses it.

    rank: of the other process.
    """

    socket: socket.socket
    rank: int

    def is_of_this_user(self) -> bool:
        """Whether the other process runs as this user: values are unpickled."""
        _, uid, _ = struct.unpack("3i", self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return uid == os.getuid()

    def send(self, message: Any, files: Sequence[int] = ()) -> None:
        """Send a value and open files. Raises ClosedError."""
        data = pickle.dumps(message)
        try:
            self.socket.settimeout(None)
            self.socket.sendall(_HEAD.pack(len(data), len(files)) + data)
            for start in range(0, len(files), _FILES):
                socket.send_fds(self.socket, [b"f"], list(files[start : start + _FILES]))
        except OSError as error:
            raise ClosedError from error

    def receive(self, timeout: float | None = None) -> tuple[Any, list[int]]:
        """The next value, and the numbers of the open files that came with it, which the caller closes.

        Raises ClosedError; TimeoutError: nothing has come for `timeout` seconds.
        """
        files: list[int] = []
        try:
            self.socket.settimeout(timeout)
            nbytes, count = _HEAD.unpack(self._exactly(_HEAD.size))
            data = self._exactly(nbytes)
            while len(files) < count:
                byte, more, _, _ = socket.recv_fds(self.socket, 1, _FILES)
                if not byte or not more:
                    raise ClosedError
                files += more
            return pickle.loads(data), files
        except TimeoutError:
            raise
        except OSError as error:
            for number in files:
                os.close(number)
            raise ClosedError from error

    def close(self) -> None:
        """End the connection."""
        with suppress(OSError):
            self.socket.close()

    def _exactly(self, nbytes: int) -> bytearray:
        data = bytearray()
        while len(data) < nbytes:
            some = self.socket.recv(min(nbytes - len(data), 1 << 20))
            if not some:
                raise ClosedError
            data += some
        return data
