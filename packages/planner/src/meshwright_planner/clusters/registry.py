"""Clusters by name or by file, and the local machine."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_planner.clusters.file import read
from meshwright_planner.clusters.local_machine import PREFIX, at_hand

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
"""Attribute of this module -> name of its file in `profiles`, and a summary line."""

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


def cluster_of(choice: str | os.PathLike[str] | Cluster | None, host: PluginHost, ranks: int = 1) -> Cluster:
    """The cluster of a request: a Cluster, the path of a file, a registered name, or None for the local machine.

    `ranks`: number of ranks; those on this machine share its memory.

    Raises:
        PluginError: no cluster has that name.
        UsageError: the file is missing or wrong; this machine's device has no profile; `choice` is none of these.
    """
    if isinstance(choice, Cluster):
        return choice
    if isinstance(choice, os.PathLike):
        return read(os.fspath(choice))
    if choice is not None and not isinstance(choice, str):
        raise UsageError(
            f"cluster={choice!r} is of type {type(choice).__name__}; give the name of a registered cluster (`meshwright plugins` "
            "lists them), the path of a .json file, a Cluster, or None for the machine at hand"
        )
    if choice is not None and choice.endswith(".json"):
        return read(choice)
    if choice is None or choice.startswith(PREFIX):
        here = at_hand(ranks, named)
        # plans keep the name of the machine that made them
        if choice is None or choice == here.name:
            return here
    from meshwright_dtensor.plugins import ClusterSpec

    target: Any = host.get(ClusterSpec, choice).load()
    return target() if callable(target) else target
