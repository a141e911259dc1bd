"""A cost model: somebody's own tables of what operations and collectives take.

Two things are said: seconds of an operation, and seconds of a collective. The planner asks them in place of the cluster's
figures; its search over placements, stages, schedules and memory stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright_dtensor.cluster import Cluster, Communication, Operation

FLOPS: Mapping[str, float] = MappingProxyType({"float32": 4e10, "bfloat16": 8e10})
"""Operations per second of products, by dtype."""

STREAMED: Mapping[str, float] = MappingProxyType({"softmax": 2e9, "dropout": 1e9})
"""Bytes per second of what streams, by kind; others at BYTES."""

BYTES = 5e9
CALL = 2e-5
"""Seconds of one call, forward or backward."""

LINKS: Mapping[str, tuple[float, float]] = MappingProxyType({"loopback": (2e-4, 5e8)})
"""Seconds of one hop and bytes per second, by the name of the outermost level that is crossed; others as the cluster says."""


class HostTables:
    """Tables of one kind of host, whatever the cluster's datasheet says."""

    def __init__(self, cluster: Cluster) -> None:
        self.slower = cluster.ranks / cluster.cores if 0 < cluster.cores < cluster.ranks else 1.0

    def operation(self, operation: Operation) -> float:
        """Products by operations, the rest by bytes; a backward pass takes as long for every gradient."""
        passes = 1 + (min(2, operation.gradients) if operation.backward else 0)
        if operation.kind == "view":
            return CALL * min(passes, 2)
        rate = FLOPS.get(operation.dtype, FLOPS["float32"])
        streamed = operation.nbytes / STREAMED.get(operation.kind, BYTES)
        return self.slower * passes * max(operation.flops / rate, streamed) + CALL * min(passes, 2)

    def collective(self, communication: Communication) -> float:
        """A ring of so many hops."""
        kind, nbytes, degree, _, link = communication
        points = LINKS.get(communication.levels[-1])
        if points is None:
            return min(link.algorithms(kind, nbytes, degree).values())
        latency, bandwidth = points
        if kind == "send_recv":
            return latency + nbytes / bandwidth
        rounds = 2 if kind == "all_reduce" else 1
        return rounds * (degree - 1) * (latency + nbytes / degree / bandwidth)
