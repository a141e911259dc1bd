"""What makes a run slow or end early, measured on each rank: limits, memory, disk, clocks, processors and links."""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright_dtensor.devices import default_device
from meshwright_dtensor.mesh.mesh import message_device
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds

FEWEST_FILES = 4096
LEAST_SHARED = 1 << 30
LEAST_DISK_SPEED = 100e6
MOST_SKEW, MOST_SLOWDOWN = 1.0, 1.5
DISK_NBYTES = 1 << 26
LINK_NUMEL = 1 << 22
REPEATS = 5


@dataclass(frozen=True)
class Check:
    """One thing that was measured.

    Attributes:
        name: of it. value: with its unit. advice: what to do; "" if nothing.
    """

    name: str
    value: str
    advice: str = ""


def checks_of_host(folder: Path) -> Iterator[Check]:
    """What one process can tell of its host. `folder`: where checkpoints go."""
    yield _open_files()
    yield _shared_memory(Path("/dev/shm"))
    yield _disk(folder)
    yield _host_name(socket.gethostname())
    record = default_device()
    for device in range(record.count()):
        memory = record.free_and_total(device)
        if memory is None:
            continue
        free, total = memory
        advice = "another process uses this device; end it" if free < 0.9 * total else ""
        yield Check(
            f"memory of {record.name}:{device}", f"{human_bytes(free)} of {human_bytes(total)} free", advice
        )


def _open_files() -> Check:
    # not on Windows
    with suppress(ImportError):
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        advice = "a rank has sockets to all others, and loaders have files; ulimit -n 65536"
        return Check("open files", f"at most {limit}", advice if limit < FEWEST_FILES else "")
    return Check("open files", "no limit")


def _shared_memory(path: Path) -> Check:
    if not path.is_dir():
        return Check("shared memory", "none")
    free = shutil.disk_usage(path).free
    advice = f"workers of data loaders put batches there; give the container more (docker run --shm-size=8g), {path} has little"
    return Check("shared memory", f"{human_bytes(free)} free", advice if free < LEAST_SHARED else "")


def _disk(folder: Path) -> Check:
    """Bytes written and made durable per second."""
    data = os.urandom(1 << 20) * (DISK_NBYTES >> 20)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
    except OSError as error:
        return Check(
            f"disk of {folder}", str(error), "checkpoints cannot be written there; choose another folder"
        )
    speed, free = DISK_NBYTES / seconds, shutil.disk_usage(folder).free
    slow = "checkpoints are written slowly; choose a faster disk (they are written in the background)"
    value = f"{speed / 1e6:.0f} MB/s, {human_bytes(free)} free"
    return Check(f"disk of {folder}", value, slow if speed < LEAST_DISK_SPEED else "")


def _host_name(name: str) -> Check:
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        advice = "gloo connects by this name; write it into /etc/hosts, or set GLOO_SOCKET_IFNAME to the interface (eth0)"
        return Check("host name", f"{name}: {error}", advice)
    return Check("host name", name)


def checks_of_ranks() -> list[Check]:
    """What the ranks of the default process group can tell of each other (a collective call); the same on every rank."""
    dist.barrier()
    now = time.time()
    mine = [now, _processor_seconds(), *_link_seconds()]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, [socket.gethostname(), *mine])
    hosts = [host for host, *_ in told]
    clocks, computing, latencies, transfers = zip(*(values for _, *values in told), strict=True)
    return list(_compared(hosts, clocks, computing, max(latencies), max(transfers)))


def _compared(
    hosts: Sequence[str], clocks: Sequence[float], computing: Sequence[float], latency: float, transfer: float
) -> Iterator[Check]:
    skew = max(clocks) - min(clocks)
    late = hosts[clocks.index(min(clocks))]
    advice = f"the clock of {late} is late; run an NTP client on all hosts" if skew > MOST_SKEW else ""
    yield Check("clocks", f"within {human_seconds(skew)}", advice)
    median = statistics.median(computing)
    slow = [rank for rank, seconds in enumerate(computing) if seconds > MOST_SLOWDOWN * median]
    names = ", ".join(f"rank {rank} on {hosts[rank]} ({computing[rank] / median:.1f} times)" for rank in slow)
    advice = (
        f"slower than the others, who wait in each step: {names}; look for other processes and for heat"
        if slow
        else ""
    )
    yield Check(
        "a product of matrices", f"{human_seconds(median)}, slowest {human_seconds(max(computing))}", advice
    )
    nbytes = 4 * LINK_NUMEL
    yield Check(
        "all-reduce between all ranks",
        f"{human_seconds(latency)} for a number, {nbytes / transfer / 1e6:.0f} MB/s for {human_bytes(nbytes)}",
    )


def _processor_seconds() -> float:
    """Seconds of a product of matrices on the device of this rank."""
    record = default_device()
    x = torch.ones(768, 768, device=record.current())

    def multiply() -> None:
        x @ x
        record.synchronize()

    return _median_seconds(multiply)


def _link_seconds() -> Iterable[float]:
    device = message_device(None)
    for numel in (1, LINK_NUMEL):
        value = torch.ones(numel, device=device)

        def reduce(value: torch.Tensor = value) -> None:
            dist.all_reduce(value)
            value[0].item()

        yield _median_seconds(reduce)


def _median_seconds(work: Callable[[], None]) -> float:
    work()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times)
