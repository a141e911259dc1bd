"""Checks of hosts and ranks: what is bad is named, with what to do, and nothing else is."""

from __future__ import annotations

import resource
import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from meshwright.commands import health
from meshwright.commands.health import Check, checks_of_host, checks_of_ranks
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
    assert "choose another folder" in named(checks_of_host(tmp_path / "none"), "disk").advice
    assert "/etc/hosts" in health._host_name("no-such-host.invalid").advice


def test_a_late_clock_and_a_slow_rank_are_named() -> None:
    hosts = ["a", "b", "b", "c"]
    checks = list(health._compared(hosts, [10.0, 10.1, 10.2, 7.0], [1.0, 1.1, 1.0, 2.5], 1e-4, 1e-2))
    assert "the clock of c" in named(checks, "clocks").advice
    assert "rank 3 on c" in named(checks, "a product").advice
    good = list(health._compared(hosts, [10.0, 10.1, 10.2, 10.0], [1.0, 1.1, 1.0, 1.2], 1e-4, 1e-2))
    assert not any(check.advice for check in good)


def of_ranks(rank: int, size: int) -> list[Check]:
    return checks_of_ranks()


def test_all_ranks_are_told_the_same(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, of_ranks)
    assert first == second and [check.name.split()[0] for check in first] == ["clocks", "a", "all-reduce"]
    assert not named(first, "clocks").advice
