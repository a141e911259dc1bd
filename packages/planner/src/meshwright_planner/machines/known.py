"""Clusters that can be planned for by name or by file, and the one at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from meshwright_dtensor.cluster import Cluster
from meshwright_planner.machines.file import read

if TYPE_CHECKING:
    from meshwright_dtensor.plugins import PluginHost

FOLDER = Path(__file__).parent / "profiles"

PROFILES = MappingProxyType(
    {
        "LAPTOP_CPU": ("laptop-cpu", "processes on one machine, gloo over loopback"),
        "DGX_A100": ("dgx-a100", "8 x A100 80 GB per node, NVLink, 8 x 200 Gb/s InfiniBand"),
        "DGX_A100_40GB": ("dgx-a100-40gb", "8 x A100 40 GB per node, NVLink, 8 x 200 Gb/s InfiniBand"),
        "DGX_H100": ("dgx-h100", "8 x H100 80 GB per node, NVLink, 8 x 400 Gb/s InfiniBand"),
        "H100_96GB": ("h100-96gb", "8 x H100 96 GB HBM2e per node, NVLink, 400 Gb/s RoCE for each"),
        "DGX_H200": ("dgx-h200", "8 x H200 141 GB per node, NVLink, 8 x 400 Gb/s InfiniBand"),
        "DGX_B200": ("dgx-b200", "8 x B200 180 GB per node, NVLink, 8 x 400 Gb/s InfiniBand"),
        "P3_16XLARGE": ("p3.16xlarge", "8 x V100 16 GB per node, NVLink, 25 Gb/s Ethernet for all"),
        "MI300X": ("mi300x", "8 x MI300X 192 GB per node, Infinity Fabric, 8 x 400 Gb/s RoCE"),
    }
)
"""Attribute of this module -> name of its file in `profiles`, and a line for people who list what is installed."""

LAPTOP_CPU: Cluster
"""Several processes on one machine, as in tests."""
DGX_A100: Cluster
DGX_H100: Cluster


def __getattr__(name: str) -> Cluster:
    if name not in PROFILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return named(PROFILES[name][0])


@cache
def named(name: str) -> Cluster:
    """The cluster of a file of this package."""
    return read(FOLDER / f"{name}.json")


def cluster_of(choice: str | Cluster | None, host: PluginHost) -> Cluster:
    """The cluster a request means: a Cluster is itself, a path is read, a name is looked up, None is the machine at hand.

    Raises:
        PluginError: no cluster of that name, with what was probably meant.
        UsageError: no such file, or it is wrong.
    """
    if isinstance(choice, Cluster):
        return choice
    if choice is not None and choice.endswith(".json"):
        return read(choice)
    from meshwright_dtensor.plugins import ClusterSpec

    if choice is not None:
        found = host.get(ClusterSpec, choice).load()
        return found() if isinstance(found, type) or _is_factory(found) else found
    return at_hand()


ACCELERATORS = MappingProxyType(
    {
        "A100-SXM4-40GB": "dgx-a100-40gb",
        "A100": "dgx-a100",
        "H200": "dgx-h200",
        "B200": "dgx-b200",
        "V100": "p3.16xlarge",
        "MI300X": "mi300x",
    }
)
"""Part of a device's name -> the profile that it is most like."""


def at_hand() -> Cluster:
    """The machine that this process runs on: its accelerator where it has one, else laptop-cpu."""
    import torch

    if not torch.cuda.is_available():
        return named("laptop-cpu")
    properties = torch.cuda.get_device_properties(0)
    like = named(next((p for part, p in ACCELERATORS.items() if part in properties.name), "dgx-h100"))
    return replace(
        like,
        name=f"{like.name} (found {properties.name})",
        devices_per_node=max(1, torch.cuda.device_count()),
        memory_bytes=int(properties.total_memory),
    )


def _is_factory(found: object) -> bool:
    return isinstance(found, Callable) and not isinstance(found, Cluster)  # type: ignore[arg-type]
