"""Checks of hosts and ranks: what is bad is named, with what to do, and nothing else is."""

from __future__ import annotations

import platform
import resource
import shutil
import socket
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands import health
from meshwright.commands.health import Check, checks_of_host, checks_of_job, of_hosts
from meshwright_dtensor.devices.cpu import Cpu
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins.host import PluginHost
from meshwright_dtensor.testing.rank_pool import RankPool

Usage = namedtuple("Usage", "total used free")


def named(checks: Any, name: str) -> Check:
    (check,) = [check for check in checks if check.name.startswith(name)]
    return check


def test_a_good_host_has_no_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 40))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (65536, 65536))
    monkeypatch.setattr(health, "LEAST_DISK_SPEED", 0.0)
    monkeypatch.setattr(health, "DISK_NBYTES", 1 << 20)
    assert not [check for check in checks_of_host(tmp_path) if check.advice and check.name != "host name"]


def test_what_is_bad_on_a_host_has_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(1 << 40, 0, 1 << 20))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    monkeypatch.setattr(health, "LEAST_DISK_SPEED", 1e15)
    monkeypatch.setattr(health, "DISK_NBYTES", 1 << 20)
    checks = list(checks_of_host(tmp_path))
    assert "ulimit" in named(checks, "open files").advice
    assert "--shm-size" in named(checks, "shared memory").advice
    assert "faster disk" in named(checks, "disk").advice
    assert not any(check.failed for check in checks if check.name != "host name")
    missing = named(checks_of_host(tmp_path / "none"), "disk")
    assert "choose another folder" in missing.advice and missing.failed
    assert "/etc/hosts" in health._host_name("no-such-host.invalid").advice


def test_a_late_clock_and_a_slow_rank_are_named() -> None:
    hosts = ["a", "b", "b", "c"]
    checks = list(health._compared(hosts, [10.0, 10.1, 10.2, 7.0], [1.0, 1.1, 1.0, 2.5], 1e-4, 1e-2))
    assert "the clock of c" in named(checks, "clocks").advice
    assert "rank 3 on c" in named(checks, "a product").advice
    good = list(health._compared(hosts, [10.0, 10.1, 10.2, 10.0], [1.0, 1.1, 1.0, 1.2], 1e-4, 1e-2))
    assert not any(check.advice for check in good)
    slow = list(health._compared(hosts, [1.0] * 4, [1.0] * 4, 1.0, 1e-2))
    assert "GLOO_SOCKET_IFNAME" in named(slow, "all-reduce").advice


def of_job(rank: int, size: int, folder: str) -> list[Check]:
    """The checks of two hosts of a rank each, of which the second has another Python and a GPU whose collectives are gloo's."""

    class Accelerator(Cpu):
        on_host = False

    environment = {"WORLD_SIZE": str(size), "LOCAL_RANK": "0"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setattr(health, "init", lambda timeout: None)
        patch.setattr(socket, "gethostname", lambda: f"node-{rank}")
        patch.setattr(health, "DISK_NBYTES", 1 << 20)
        if folder:
            patch.setattr(platform, "python_version_tuple", lambda: ("3", str(rank), "0"))
            patch.setattr(health, "default_device", Accelerator)
        return checks_of_job(Path(folder or "."), PluginHost({}))


def test_all_hosts_and_ranks_are_checked(rank_pool: RankPool, tmp_path: Path) -> None:
    checks, _ = rank_pool.run(2, of_job, "")
    names = [check.name for check in checks]
    for host in ("node-0", "node-1"):
        assert {f"{host}: open files", f"{host}: disk of .", f"{host}: memory of the host"} <= set(names)
    assert not named(checks, "clocks").advice and not named(checks, "versions").advice
    assert named(checks, "versions").value == "alike on 2 ranks"
    last = named(checks, "collectives between accelerators")
    assert "no accelerator here" in last.value and not last.advice


def test_accelerators_and_other_versions(rank_pool: RankPool, tmp_path: Path) -> None:
    checks, _ = rank_pool.run(2, of_job, str(tmp_path))
    versions = named(checks, "versions")
    assert "Python 3.0 on rank 0, Python 3.1 on rank 1" in versions.value
    assert versions.advice == "install the same on every rank" and versions.failed
    assert named(checks, "all-reduce over gloo between all accelerators").value.endswith("MB/s for 16.0 MiB")


def test_ranks_that_do_not_reach_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def init(timeout: float) -> None:
        raise RuntimeError("connectFullMesh failed\nmore")

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(health, "init", init)
    check = named(checks_of_job(tmp_path, PluginHost({})), "collectives")
    assert check.value == "connectFullMesh failed" and "GLOO_SOCKET_IFNAME" in check.advice and check.failed

    def no_device(timeout: float) -> None:
        raise UsageError("this is rank 1 of its host; there is one device; start one rank a device")

    monkeypatch.setattr(health, "init", no_device)
    assert named(checks_of_job(tmp_path, PluginHost({})), "collectives").advice == "start one rank a device"


def test_hosts_of_one_name_are_told_apart() -> None:
    check = Check("host name", "vm")
    assert of_hosts([("vm", [check]), ("vm", [])]) == [check]
    names = [each.name for each in of_hosts([("vm", [check]), ("vm", []), ("vm", [check]), ("b", [check])])]
    assert names == ["host of rank 0: host name", "host of rank 2: host name", "b: host name"]


@pytest.mark.parametrize(("limit", "advice"), [("max", False), (str(3 << 30), True)])
def test_memory_is_that_of_the_container(tmp_path: Path, limit: str, advice: bool) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 99999999 kB\nMemAvailable: 8388608 kB\n")
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    (tmp_path / "memory.current").write_text(f"{2 << 30}\n")
    check = health._memory(tmp_path / "meminfo", tmp_path)
    assert check.value == ("1.0 GiB free" if advice else "8.0 GiB free") and bool(check.advice) == advice
    assert health._memory(tmp_path / "none", tmp_path).value == "not known"
    # cached pages of files give way
    (tmp_path / "memory.stat").write_text(f"anon {1 << 29}\nactive_file {1 << 29}\ninactive_file {1 << 30}\n")
    assert health._memory(tmp_path / "meminfo", tmp_path).value == (
        "2.5 GiB free" if advice else "8.0 GiB free"
    )
