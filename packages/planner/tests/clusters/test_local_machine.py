"""The machine at hand: no cluster is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from planner_models import HOST, Mlp, eager

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.clusters import local_machine
from meshwright_planner.clusters.file import read
from meshwright_planner.clusters.registry import DGX_H100, FOLDER, cluster_of


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)


def devices(monkeypatch: pytest.MonkeyPatch, name: str, count: int = 4, memory: int = 85 * 10**9) -> None:
    """As if torch saw so many devices of that name."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (memory, memory))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: name)


def test_innermost_link_joins_the_devices_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    devices(monkeypatch, "NVIDIA H100 80GB HBM3")
    cluster = cluster_of(None, HOST, 8)
    assert (cluster.devices_per_node, cluster.memory_bytes) == (4, 85 * 10**9)
    assert cluster.link(1, 4).name == "nvlink" and cluster.running(8).link(1, 8).name == "infiniband"
    assert cluster.rate("bfloat16") == DGX_H100.rate("bfloat16") and "another board" not in cluster.source
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cluster_of(None, HOST, 8).running(8).link(1, 4).name == "infiniband"


@pytest.mark.parametrize("name", ["NVIDIA A10G", "NVIDIA GH200 480GB", "NVIDIA H20", "NVIDIA H1000"])
def test_device_without_profile_is_rejected(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    devices(monkeypatch, name)
    with pytest.raises(UsageError, match=rf"'{name}'.*meshwright calibrate.*cluster='machine.json'"):
        cluster_of(None, HOST)


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA H100 PCIe", "dgx-h100"),
        ("NVIDIA A100-PCIE-40GB", "dgx-a100"),
        ("Tesla V100-SXM2-32GB", "p3.16xlarge"),
    ],
)
def test_related_device_is_noted(monkeypatch: pytest.MonkeyPatch, name: str, profile: str) -> None:
    devices(monkeypatch, name)
    plan = eager().plan(Mlp(), torch.zeros(8, 64), PlanRequest(world_size=2))[0]
    note = next(note for note in plan.provenance.notes if "machine at hand" in note)
    assert f"4 x {name}" in note and f"{profile!r}, whose devices have the same chip on another board" in note


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        ("NVIDIA A100-SXM4-40GB", "dgx-a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", "dgx-a100"),
        ("NVIDIA H200", "dgx-h200"),
        ("NVIDIA B200", "dgx-b200"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_device_with_profile_uses_it(monkeypatch: pytest.MonkeyPatch, name: str, profile: str) -> None:
    devices(monkeypatch, name)
    source = cluster_of(None, HOST).source
    assert f"{profile!r}, not measured" in source


def test_cpu_ranks_share_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(local_machine, "usable_cores", lambda: 3)
    monkeypatch.setattr(local_machine, "usable_memory", lambda: 48 * 2**30)
    cluster = cluster_of(None, HOST, 6)
    assert (cluster.memory_bytes, cluster.cores, cluster.crowding) == (8 * 2**30, 3, ())
    assert not cluster.hides_launch and not cluster.hides_communication
    assert cluster.running(6).rate("float32") == pytest.approx(cluster.running(3).rate("float32") / 2)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # three machines of two ranks
    assert cluster_of(None, HOST, 6).memory_bytes == 24 * 2**30
    assert cluster_of(None, HOST, 1).memory_bytes == 48 * 2**30
    plan = eager().plan(Mlp(), torch.zeros(8, 64), PlanRequest(world_size=6))[0]
    assert "planned for the machine at hand: 3 cores and 48.0 GiB" in "\n".join(plan.provenance.notes)
    assert plan.provenance.cluster == "this machine (3 cores)"
    assert cluster_of(plan.provenance.cluster, HOST, 6) == cluster_of(None, HOST, 6)
    monkeypatch.setattr(local_machine, "usable_cores", lambda: 4)  # the plan is read on another machine
    with pytest.raises(PluginError, match="3 cores"):
        cluster_of(plan.provenance.cluster, HOST, 6)


def test_memory_is_limited_by_the_machine() -> None:
    assert 2**28 < local_machine.usable_memory() < 2**50


def test_outer_level_may_end_at_nodes(tmp_path: Path) -> None:
    data = json.loads((FOLDER / "dgx-h100.json").read_text())
    inner, outer = data["links"]
    data["links"] = [{**inner, "name": "bridge", "size": 2}, inner, outer]
    (tmp_path / "own.json").write_text(json.dumps(data))
    assert read(tmp_path / "own.json").devices_per_node == 8
