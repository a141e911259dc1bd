"""A cluster as numbers: devices, memory, rates and links.  Torch-free, so that it can be named where no device exists.

Rates are the vendor's peaks; what a kernel reaches of them is the cost model's business (`compute_efficiency`,
`memory_efficiency`), as is what is left of the memory after the runtime took its share (`reserved_bytes`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from meshwright_dtensor.strategy import Link


@dataclass(frozen=True)
class LinkLevel:
    """One level of the network, innermost first.

    Args:
        name: e.g. "nvlink".
        size: number of ranks that this level connects; 0 for "as many as there are" (the outermost level).
        latency_s: seconds of one hop before the first byte arrives.
        bandwidth_Bps: bytes per second that ONE rank sends in one direction.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_Bps: float


@dataclass(frozen=True)
class Cluster:
    """Devices of one kind joined by levels of links; everything is per rank, one rank per device.

    Args:
        name: as in the plugin record.
        devices_per_node: ranks in one node.
        memory_bytes: memory of one rank.
        flops: dtype name ("float32", "bfloat16", ...) -> peak dense operations per second of one rank; a dtype that
            is missing runs at the rate of "float32".
        memory_bandwidth: bytes per second between one rank's memory and its cores.
        links: levels of the network, innermost first.
        source: where the numbers come from.
        compute_efficiency: share of the peak that a large matrix product reaches.
        memory_efficiency: share of `memory_bandwidth` that a streaming kernel reaches.
        launch_s: seconds that the host needs to issue one operation in eager mode.
        fused_attention: attention kernels keep no matrix of scores for the backward pass.
        reserved_bytes: memory that is never the model's: context, communication buffers, fragmentation.
    """

    name: str
    devices_per_node: int
    memory_bytes: int
    flops: Mapping[str, float]
    memory_bandwidth: float
    links: tuple[LinkLevel, ...]
    source: str
    compute_efficiency: float = 0.6
    memory_efficiency: float = 0.8
    launch_s: float = 5e-6
    reserved_bytes: int = 0
    fused_attention: bool = True

    @property
    def usable_bytes(self) -> int:
        """Bytes of one rank's memory that a model may take."""
        return self.memory_bytes - self.reserved_bytes

    def rate(self, dtype: str) -> float:
        """Operations per second that a large matrix product of `dtype` reaches on one rank."""
        return self.flops.get(dtype, self.flops["float32"]) * self.compute_efficiency

    def link(self, stride: int, degree: int) -> Link:
        """The link of a group of `degree` ranks whose ranks are `stride` apart.

        A group that fits in an inner level uses that level. One that spans several inner groups is as fast as the
        outer links of all its members in one inner group together, though never faster than the inner level: each
        device of a node brings its own network card, and a collective uses them all.
        """
        extent = stride * degree
        inner: LinkLevel | None = None
        for level in self.links:
            if not level.size or extent <= level.size or level is self.links[-1]:
                if inner is None:
                    return Link(level.name, level.latency_s, level.bandwidth_Bps)
                members = max(1, inner.size // stride)
                bandwidth = min(inner.bandwidth_Bps, level.bandwidth_Bps * members)
                return Link(level.name, level.latency_s, bandwidth)
            inner = level
        raise ValueError(f"cluster {self.name!r} has no links; give at least one LinkLevel")
