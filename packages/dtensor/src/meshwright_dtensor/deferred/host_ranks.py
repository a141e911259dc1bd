"""Which ranks of this host build a model together, and their connections.

The first rank to come is the builder. It binds a socket whose name follows from the job, the host, and the line of code that
builds; the others connect to it. The name is abstract: nothing of it is in a file system, and it ends with its process.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshwright_dtensor._torch.groups import default_store
from meshwright_dtensor.deferred.channels import Channel, ClosedError

JOIN_SECONDS = 30.0
"""Seconds that the first rank of a host waits for the others. A rank that comes later builds alone."""
_POLL = 0.02
_KEYS = "meshwright/deferred/"


@dataclass
class HostRanks:
    """The ranks of this host that build together.

    rank: of this process.
    builder: the rank that builds.
    channels: of the builder, to every other rank; of another rank, to the builder.
    missing: ranks of the host, or their number, that have not come in time; "" if all have.
    """

    rank: int
    builder: int
    channels: list[Channel]
    missing: str = ""
    listener: socket.socket | None = field(default=None, repr=False)

    def turn_away(self) -> None:
        """Tell ranks that came too late to build alone."""
        while self.listener is not None:
            try:
                late, _ = self.listener.accept()
            except OSError:
                return
            with suppress(ClosedError):
                Channel(late, -1).send("late")
            late.close()

    def close(self) -> None:
        """End all connections."""
        for channel in self.channels:
            channel.close()
        if self.listener is not None:
            self.listener.close()


@dataclass(frozen=True)
class Job:
    """What the ranks of one job have in common.

    name: of the job, another one for each start of it.
    rank: of this process.
    of_host: the ranks of this host, or their number alone; None while other ranks have not said where they are.
    """

    name: str
    rank: int
    of_host: Callable[[], frozenset[int] | int | None]


def host_identity() -> str:
    """A text that is the same for processes of one host that can connect to each other, and belong to one user."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def this_job() -> Job | None:
    """The job that this process is a rank of, by torchrun's environment or by the default process group; None of one alone."""
    given = os.environ.get
    size = dist.get_world_size() if dist.is_initialized() else None
    launched = all(
        given(key) for key in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    if launched and size in (None, int(given("WORLD_SIZE", "0"))):
        keys = (
            "MASTER_ADDR",
            "MASTER_PORT",
            "WORLD_SIZE",
            "TORCHELASTIC_RUN_ID",
            "TORCHELASTIC_RESTART_COUNT",
        )
        count = int(given("LOCAL_WORLD_SIZE", "1"))
        name = " ".join(given(key, "") for key in keys)
        return Job(name, int(given("RANK", "0")), lambda: count) if count > 1 else None
    if size in (None, 1) or dist.get_backend() == "fake":
        return None
    return _job_of_group(default_store(), dist.get_rank(), range(size))


def _job_of_group(store: Any, rank: int, ranks: range) -> Job:
    here = host_identity()
    name = store.compare_set(f"{_KEYS}job", "", uuid.uuid4().hex).decode()
    store.set(f"{_KEYS}host {rank}", here)

    def of_host() -> frozenset[int] | None:
        keys = [f"{_KEYS}host {other}" for other in ranks]
        if not store.check(keys):
            return None
        return frozenset(other for other, key in zip(ranks, keys) if store.get(key).decode() == here)

    return Job(name, rank, of_host)


def calling_line(skip: frozenset[str]) -> str:
    """The file and line of the innermost caller outside of the files `skip`."""
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename in skip | {__file__}:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def join_host(job: Job, where: str, seconds: float = JOIN_SECONDS) -> HostRanks | None:
    """Join the ranks of this host that build at the line `where`; None if no other one has come in time.

    Raises OSError: the system has no such sockets.
    """
    digest = zlib.crc32(where.encode()), zlib.crc32(f"{job.name} {host_identity()}".encode())
    address = f"\0meshwright-deferred-{digest[1]:08x}-{digest[0]:08x}".encode()
    hello = (job.name, where, job.rank)
    deadline = time.monotonic() + seconds
    while True:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(address)
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
            try:
                return _connected(address, hello, job.rank, deadline)
            except ConnectionRefusedError:
                # the builder has bound its socket and does not listen yet, or has just ended
                if time.monotonic() > deadline:
                    return None
                time.sleep(_POLL)
                continue
        return _gathered(listener, job, hello, deadline)


def _connected(address: bytes, hello: tuple[str, str, int], rank: int, deadline: float) -> HostRanks | None:
    """The connection to the builder; None if it is not of this job, or turns this rank away."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    channel = Channel(connection, -1)
    try:
        connection.connect(address)
        if channel.is_of_this_user():
            channel.send(hello)
            # the builder decides when the time is over, and says so
            answer, _ = channel.receive(max(1.0, deadline - time.monotonic()) + 5.0)
            if isinstance(answer, int):
                channel.rank = answer
                return HostRanks(rank, answer, [channel])
    except ConnectionRefusedError:
        channel.close()
        raise
    except (ClosedError, TimeoutError):
        pass
    channel.close()
    return None


def _gathered(
    listener: socket.socket, job: Job, hello: tuple[str, str, int], deadline: float
) -> HostRanks | None:
    """The builder's connections, once all ranks of the host have come or the time is over."""
    listener.listen(1024)
    listener.settimeout(_POLL)
    channels: dict[int, Channel] = {}
    expected = job.of_host()
    while time.monotonic() < deadline and not _all_here(channels, job.rank, expected):
        with suppress(TimeoutError):
            connection, _ = listener.accept()
            channel = _admitted(Channel(connection, -1), hello, channels)
            if channel is not None:
                channels[channel.rank] = channel
        expected = job.of_host() if expected is None else expected
    missing = ""
    if not _all_here(channels, job.rank, expected):
        absent = expected - {job.rank, *channels} if isinstance(expected, frozenset) else None
        missing = f"ranks {sorted(absent)}" if absent else "other ranks"
    listener.settimeout(0.0)
    ranks = HostRanks(job.rank, job.rank, list(channels.values()), missing, listener)
    for channel in list(ranks.channels):
        try:
            channel.send(job.rank)
        except ClosedError:
            ranks.channels.remove(channel)
    return ranks


def _all_here(channels: dict[int, Channel], rank: int, expected: frozenset[int] | int | None) -> bool:
    if isinstance(expected, int):
        return len(channels) + 1 >= expected
    return expected is not None and expected <= {rank, *channels}


def _admitted(channel: Channel, hello: tuple[str, str, int], channels: dict[int, Channel]) -> Channel | None:
    """The connection of a rank of this job that builds at the same line; others are closed."""
    with suppress(ClosedError, TimeoutError):
        if channel.is_of_this_user():
            other, _ = channel.receive(5.0)
            # a child process of a rank has its environment
            if other[:2] == hello[:2] and other[2] not in channels and other[2] != hello[2]:
                channel.rank = other[2]
                return channel
    channel.close()
    return None
