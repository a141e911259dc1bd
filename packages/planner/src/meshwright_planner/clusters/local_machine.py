"""This machine as a cluster: its devices and memory, with the rates of a profile of the same device."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.names import count_of
from meshwright_dtensor.utils.process import usable_cores

PREFIX = "this machine ("
"""Prefix of names of local machines; no registered cluster has such a name."""

CPU = "laptop-cpu"
"""The profile whose rates are used for CPUs."""

SAME = MappingProxyType(
    {
        "A100-SXM4-40GB": "dgx-a100-40gb",
        "A100-SXM4-80GB": "dgx-a100",
        "H100 80GB HBM3": "dgx-h100",
        "NVIDIA H200": "dgx-h200",
        "NVIDIA B200": "dgx-b200",
        "V100-SXM2-16GB": "p3.16xlarge",
        "Instinct MI300X": "mi300x",
    }
)
"""End of a device's name -> the profile of that device."""

NEAR = MappingProxyType({"A100": "dgx-a100", "H100": "dgx-h100", "V100": "p3.16xlarge", "MI300X": "mi300x"})
"""A word of a device's name -> the profile of the same chip on another board."""


def at_hand(ranks: int, named: Callable[[str], Cluster]) -> Cluster:
    """The machine of this process, for `ranks` ranks. Raises UsageError: none of the profiles (`named`) is of its device."""
    from meshwright_dtensor.devices import default_device

    record = default_device()
    if record.on_host:
        return _processors(ranks, named(CPU))
    memory = record.free_and_total(0)
    if memory is None:
        raise UsageError(
            f"cluster=None plans for the machine at hand, and torch does not say how much memory its {record.name} devices have; "
            "name a cluster (`meshwright plugins` lists them) or give the file of one"
        )
    return _devices(record.chip(), memory[1], record.count(), named)


def _processors(ranks: int, like: Cluster) -> Cluster:
    """Ranks that share the memory and the cores of this machine."""
    here, cores, memory = min(_local() or ranks, ranks), usable_cores(), usable_memory()
    return replace(
        like,
        name=f"{PREFIX}{cores} cores)",
        devices_per_node=here,
        memory_bytes=memory // here,
        cores=cores,
        # the same cores compute, launch operations and communicate
        hides_launch=False,
        hides_communication=False,
        source=(
            f"{cores} cores and {human_bytes(memory)} of this machine for {count_of(here, 'rank')}; "
            f"its rates are those of {like.name!r}, an order of magnitude: `meshwright calibrate` measures them"
        ),
    )


def _devices(device: str, memory: int, count: int, named: Callable[[str], Cluster]) -> Cluster:
    """Devices of this machine, at the rates of a profile. Raises UsageError where there is none of such a device."""
    same = next((p for end, p in SAME.items() if device.endswith(end)), None)
    near = next((p for word, p in NEAR.items() if re.search(rf"(?<!\w){word}(?!\w)", device)), None)
    if same is None and near is None:
        raise UsageError(
            f"cluster=None plans for the machine at hand, and no profile is of its device {device!r}; measure it with "
            "`meshwright calibrate -o machine.json` and give cluster='machine.json', or name a cluster "
            "(`meshwright plugins` lists them)"
        )
    like, here = named(str(same or near)), _local() or count
    inner = replace(like.links[0], size=here)
    ends = ", ".join(end for end, profile in SAME.items() if profile == like.name)
    board = "" if same else f", whose devices have the same chip on another board ({ends})"
    return replace(
        like,
        name=f"{PREFIX}{here} x {device})",
        devices_per_node=here,
        memory_bytes=memory,
        links=(inner, *like.links[1:]),
        source=(
            f"{here} x {device} of {human_bytes(memory)} found here; rates and links are those of {like.name!r}{board}, not "
            "measured: `meshwright calibrate` measures them"
        ),
    )


def _local() -> int | None:
    """Ranks of the running job on this machine, from torchrun; None without a job."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(text) if text.isdigit() and int(text) > 0 else None


def usable_memory() -> int:
    """Bytes that processes may use here: the memory of the machine, or the limit of its container."""
    has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = Path("/sys/fs/cgroup/memory.max")
    text = allowed.read_text().strip() if allowed.is_file() else ""
    return min(has, int(text)) if text.isdigit() else has
