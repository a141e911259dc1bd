"""Clusters that can be planned for by name, and the one at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright_dtensor.cluster import Cluster, LinkLevel

if TYPE_CHECKING:
    from meshwright_dtensor.plugins import PluginHost

LAPTOP_CPU = Cluster(
    name="laptop-cpu",
    devices_per_node=64,
    memory_bytes=8 * 2**30,
    flops={"float32": 50e9, "float64": 25e9, "bfloat16": 50e9, "float16": 10e9},
    memory_bandwidth=10e9,
    links=(LinkLevel("loopback", 0, 50e-6, 1e9),),
    source="order of magnitude of one core of a laptop and gloo over loopback; run on processes, not devices",
    compute_efficiency=0.5,
    launch_s=5e-6,
    fused_attention=False,
)
"""Several processes on one machine, as in tests."""

DGX_A100 = Cluster(
    name="dgx-a100",
    devices_per_node=8,
    memory_bytes=80 * 10**9,
    flops={"float32": 19.5e12, "bfloat16": 312e12, "float16": 312e12, "float64": 9.7e12},
    memory_bandwidth=2.039e12,
    links=(LinkLevel("nvlink", 8, 2e-6, 300e9), LinkLevel("infiniband", 0, 5e-6, 25e9)),
    source=(
        "NVIDIA A100 80GB SXM datasheet (312 TFLOPS bf16 dense, 2039 GB/s, NVLink 600 GB/s both ways); "
        "NVIDIA DGX A100 datasheet (8 x 200 Gb/s InfiniBand); latency a hop is an order of magnitude"
    ),
    reserved_bytes=4 * 10**9,
)
"""8 x A100 80 GB in a node."""

DGX_H100 = Cluster(
    name="dgx-h100",
    devices_per_node=8,
    memory_bytes=80 * 10**9,
    flops={"float32": 67e12, "bfloat16": 989e12, "float16": 989e12, "float64": 34e12},
    memory_bandwidth=3.35e12,
    links=(LinkLevel("nvlink", 8, 2e-6, 450e9), LinkLevel("infiniband", 0, 5e-6, 50e9)),
    source=(
        "NVIDIA H100 SXM datasheet (989 TFLOPS bf16 dense, 3.35 TB/s, NVLink 900 GB/s both ways); "
        "NVIDIA DGX H100 datasheet (8 x 400 Gb/s ConnectX-7); latency a hop is an order of magnitude"
    ),
    reserved_bytes=4 * 10**9,
)
"""8 x H100 80 GB in a node."""


def cluster_of(choice: str | Cluster | None, host: PluginHost) -> Cluster:
    """The cluster a request means: a Cluster is itself, a name is looked up, None is the machine at hand.

    Raises:
        PluginError: no cluster of that name, with what was probably meant.
    """
    if isinstance(choice, Cluster):
        return choice
    from meshwright_dtensor.plugins import ClusterSpec

    if choice is not None:
        found = host.get(ClusterSpec, choice).load()
        return found() if isinstance(found, type) or _is_factory(found) else found
    return at_hand()


def at_hand() -> Cluster:
    """The machine that this process runs on: its accelerator where it has one, else laptop-cpu."""
    import torch

    if not torch.cuda.is_available():
        return LAPTOP_CPU
    properties = torch.cuda.get_device_properties(0)
    like = DGX_A100 if "A100" in properties.name else DGX_H100
    return replace(
        like,
        name=f"{like.name} (found {properties.name})",
        devices_per_node=max(1, torch.cuda.device_count()),
        memory_bytes=int(properties.total_memory),
    )


def _is_factory(found: object) -> bool:
    return isinstance(found, Callable) and not isinstance(found, Cluster)  # type: ignore[arg-type]
