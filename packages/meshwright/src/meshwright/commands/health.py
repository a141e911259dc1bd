"""What makes a run slow or end early, measured on each host and rank: limits, memory, disk, clocks, processors and links.

What cannot be measured since ranks do not reach each other is a check too, with what they said and what to do.
"""

from __future__ import annotations

import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from meshwright_checkpoint.io.host_memory import available_memory
from meshwright_dtensor.devices import default_device
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.mesh.mesh import init, message_device
from meshwright_dtensor.plugins.host import PluginHost
from meshwright_dtensor.plugins.rank_check import compare_across_ranks
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.names import count_of

FEWEST_FILES = 4096
LEAST_SHARED = 1 << 30
LEAST_DISK_SPEED = 100e6
LEAST_MEMORY = 2 << 30
MOST_SKEW, MOST_SLOWDOWN = 1.0, 1.5
MOST_LATENCY, LEAST_LINK_SPEED = 0.02, 20e6
DISK_NBYTES = 1 << 26
LINK_NUMEL = 1 << 22
REPEATS = 5
REACH_SECONDS = 60.0
"""How long ranks may take to reach each other."""


@dataclass(frozen=True)
class Check:
    """One thing that was measured.

    Attributes:
        name: of it. value: with its unit. advice: what to do; "" if nothing.
        failed: a run would not work, or be wrong; not only slow.
    """

    name: str
    value: str
    advice: str = ""
    failed: bool = False


def checks_of_host(folder: Path) -> Iterator[Check]:
    """What one process can tell of its host. `folder`: where checkpoints go."""
    yield _open_files()
    yield _shared_memory(Path("/dev/shm"))
    yield _disk(folder)
    yield _host_name(socket.gethostname())
    yield _memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))
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
        advice = f"workers of data loaders put batches there; mount a tmpfs at {path}"
        return Check("shared memory", "none", advice if sys.platform == "linux" else "")
    free = shutil.disk_usage(path).free
    advice = f"workers of data loaders put batches there; give the container more (docker run --shm-size=8g), {path} has little"
    return Check("shared memory", f"{human_bytes(free)} free", advice if free < LEAST_SHARED else "")


def _memory(system: Path, limits: Path) -> Check:
    """What processes may still take: of the system, and of the container. system, limits: files of Linux."""
    name = "memory of the host"
    free = available_memory(system, limits)
    if free is None:
        return Check(name, "not known")
    advice = "little for a rank, its batches and checkpoints; end other processes, or give the container more"
    return Check(name, f"{human_bytes(free)} free", advice if free < LEAST_MEMORY else "")


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
        advice = "checkpoints cannot be written there; choose another folder"
        return Check(f"disk of {folder}", str(error), advice, failed=True)
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


def checks_of_job(folder: Path, host: PluginHost) -> list[Check]:
    """What all hosts and ranks of this job can tell (a collective call); on rank 0 all of it.

    folder: as for `checks_of_host`. host: the plugins of this rank.
    """
    first_of_host = os.environ.get("LOCAL_RANK", "0") == "0"
    mine = list(checks_of_host(folder)) if first_of_host else []
    if "WORLD_SIZE" not in os.environ or os.environ["WORLD_SIZE"] == "1":
        return mine
    try:
        init(timeout=REACH_SECONDS)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (socket.gethostname(), mine))
    except (RuntimeError, UsageError) as error:
        return [*mine, _not_reached("all ranks", error)]
    checks = of_hosts(told)
    checks.append(_alike(host))
    checks += checks_of_ranks()
    checks.append(_on_accelerators())
    dist.barrier()
    return checks


def of_hosts(told: Sequence[tuple[str, Sequence[Check]]]) -> list[Check]:
    """The checks of all hosts, with the name of the host where there are several. told: of each rank."""
    ranks = [rank for rank, (_, checks) in enumerate(told) if checks]
    if len(ranks) == 1:
        return list(told[ranks[0]][1])
    names = Counter(told[rank][0] for rank in ranks)
    hosts = {rank: told[rank][0] if names[told[rank][0]] == 1 else f"host of rank {rank}" for rank in ranks}
    return [replace(check, name=f"{hosts[rank]}: {check.name}") for rank in ranks for check in told[rank][1]]


def _not_reached(what: str, error: Exception) -> Check:
    """Ranks that do not reach each other."""
    lines = str(error).splitlines() or [type(error).__name__]
    if isinstance(error, UsageError):
        rule, _, fix = lines[0].rpartition("; ")
        return Check(f"collectives between {what}", rule or lines[0], fix, failed=True)
    advice = (
        "ranks do not reach each other: set GLOO_SOCKET_IFNAME on each host to the interface between hosts (ip -brief addr), and "
        "open all ports above 1024 between them"
    )
    return Check(f"collectives between {what}", lines[0], advice, failed=True)


def _alike(host: PluginHost) -> Check:
    """Versions and plugins, which must be equal on all ranks."""
    name = "versions and plugins of the ranks"
    try:
        compare_across_ranks(host)
    except (PluginError, UsageError) as error:
        difference, _, fix = str(error).rpartition("; ")
        return Check(name, difference, fix, failed=True)
    return Check(name, f"alike on {count_of(dist.get_world_size(), 'rank')}")


def _on_accelerators() -> Check:
    """The collectives of the accelerators: each rank sends from its own."""
    record = default_device()
    if record.on_host:
        why = "no accelerator here, so its collectives (NCCL) are not tried"
        return Check("collectives between accelerators", why)
    backend = record.backend()
    name = f"all-reduce over {backend} between all accelerators"
    value = torch.ones(LINK_NUMEL, device=record.current())
    try:
        for _ in range(2):
            # the first makes the connections
            value.fill_(1)
            record.synchronize()
            start = time.perf_counter()
            work = dist.all_reduce(value, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=REACH_SECONDS))
            total = value[-1].item()
            seconds = time.perf_counter() - start
    except RuntimeError as error:
        advice = (
            "the accelerators do not reach each other: NCCL_DEBUG=INFO says over what they try; set NCCL_SOCKET_IFNAME to the "
            "interface between hosts, or NCCL_IB_DISABLE=1 and NCCL_P2P_DISABLE=1 to find out which link fails"
        )
        return Check(name, (str(error).splitlines() or [type(error).__name__])[0], advice, failed=True)
    size = dist.get_world_size()
    if total != size:
        advice = "the sum is wrong: a link or a driver is broken; try each host alone"
        return Check(name, f"{total:g} as the sum of {size} ones", advice, failed=True)
    nbytes = value.nbytes
    return Check(name, f"{nbytes / seconds / 1e6:.0f} MB/s for {human_bytes(nbytes)}")


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
    is_slow = latency > MOST_LATENCY or nbytes / transfer < LEAST_LINK_SPEED
    advice = "slow for gloo: other processes take the processors or the network, or it uses a slow interface (GLOO_SOCKET_IFNAME)"
    yield Check(
        "all-reduce between all ranks",
        f"{human_seconds(latency)} for a number, {nbytes / transfer / 1e6:.0f} MB/s for {human_bytes(nbytes)}",
        advice if is_slow else "",
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
