"""A cluster as numbers: devices, memory, rates and links.  Torch-free, so that it can be named where no device exists.

Rates are the vendor's peaks; what a kernel reaches of them is the cost model's business (`compute_efficiency`,
`memory_efficiency`), as is what is left of the memory after the runtime took its share (`reserved_bytes`).  A machine that
was measured (`meshwright calibrate`) also says how long operations and collectives of each size took on it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

from meshwright_dtensor.cluster.links import Link, MeasuredCollective, Points, interpolated
from meshwright_dtensor.errors import UsageError


@dataclass(frozen=True)
class LinkLevel:
    """One level of the network, innermost first.

    Args:
        name: e.g. "nvlink".
        size: number of ranks that this level connects; 0 for "as many as there are" (the outermost level).
        latency_s: seconds of one hop before the first byte arrives.
        bandwidth_Bps: bytes per second that ONE rank sends in one direction.
        sizes: ranks in each group of this level in rank order, where they are not all `size`; the last repeats.
    """

    name: str
    size: int
    latency_s: float
    bandwidth_Bps: float
    sizes: tuple[int, ...] = ()

    def groups(self, ranks: int) -> list[int]:
        """Where groups of this level begin among `ranks` ranks, and `ranks` itself."""
        bounds, number = [0], 0
        while bounds[-1] < ranks:
            size = self.sizes[min(number, len(self.sizes) - 1)] if self.sizes else self.size
            bounds.append(min(ranks, bounds[-1] + size) if size else ranks)
            number += 1
        return bounds

    def members(self, stride: int, degree: int, ranks: int) -> int:
        """Fewest ranks of a group (`degree` ranks, `stride` apart) that one group of this level holds; `degree` if it
        holds them all.

        Groups of an axis follow each other, so one may straddle a boundary where sizes do not divide.
        """
        extent = stride * degree
        if not self.size and not self.sizes:
            return degree
        if not self.sizes and self.size % extent == 0:
            return degree
        if not self.sizes and extent % self.size == 0:
            return max(1, self.size // stride)
        bounds, fewest = self.groups(max(ranks, extent)), degree
        for begin in range(0, max(ranks, extent) - extent + 1, extent):
            for low, high in pairwise(bounds):
                held = len(range(max(begin, low), min(begin + extent, high), stride))
                if held:
                    fewest = min(fewest, held)
        return fewest


Spans = tuple[tuple[int, int], ...]
"""(stride, degree) of the axes over whose product a group of ranks runs, outermost first."""


def joined(axes: Sequence[tuple[int, int]]) -> Spans:
    """The same group by as few axes as there can be: two with nothing between them are one, those of one rank are none."""
    found: list[tuple[int, int]] = []
    for stride, degree in axes:
        if found and found[-1][0] == stride * degree:
            found[-1] = stride, found[-1][1] * degree
        elif degree > 1:
            found.append((stride, degree))
    return tuple(found) or ((1, 1),)


@lru_cache(maxsize=4096)
def members(level: LinkLevel, axes: Spans, ranks: int) -> int:
    """Fewest ranks of a group over these axes (see `joined`) that one group of a level holds; their number if it holds all."""
    if len(axes) == 1:
        return level.members(*axes[0], ranks)
    degree, extent = math.prod(d for _, d in axes), math.prod(axes[0])
    if not level.size and not level.sizes:
        return degree
    if not level.sizes and all(level.size % (s * d) == 0 or s * d % level.size == 0 for s, d in axes):
        return math.prod(min(d, max(1, level.size // s)) for s, d in axes)
    ranks = max(ranks, extent)
    bounds = level.groups(ranks)
    offsets = [sum(steps) for steps in product(*(range(0, s * d, s) for s, d in axes))]
    fewest = degree
    for first in range(ranks):  # groups straddle boundaries each in its own way
        if first + offsets[-1] < ranks and not any(first // s % d for s, d in axes):
            held = Counter(bisect_right(bounds, first + offset) for offset in offsets)
            fewest = min(fewest, *held.values())
    return fewest


@dataclass(frozen=True)
class SlowNode:
    """A node that is worse than the others.

    Args:
        node: its number, from 0.
        compute: how many times as long its ranks compute.
        link: a level of links that reaches only `share` of its bandwidth there; None for none.
        share: of that level's bandwidth.

    Raises:
        UsageError: a number is out of range, or there is a share of no link.
    """

    node: int
    compute: float = 1.0
    link: str | None = None
    share: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.node, bool) or not isinstance(self.node, int) or self.node < 0:
            raise UsageError(f"SlowNode(node={self.node!r}): give the number of a node, from 0")
        if not 1 <= self.compute < math.inf:
            raise UsageError(
                f"SlowNode({self.node}, compute={self.compute!r}): it is how many times as long the node computes; give 1 or more"
            )
        if not 0 < self.share <= 1:
            raise UsageError(
                f"SlowNode({self.node}, share={self.share!r}): it is a part of a link's bandwidth; give more than 0, 1 at most"
            )
        if self.link is None and self.share != 1:
            raise UsageError(f"SlowNode({self.node}, share={self.share!r}) is of no link; name it")


@dataclass(frozen=True)
class MeasuredWork:
    """How long one kind of work took on one rank, launch included: (size, seconds) of forward and of backward.

    Args:
        kind: "matmul" and "attention", by floating-point operations of the forward pass; others by bytes moved.
        dtype: e.g. "float32".
    """

    kind: str
    dtype: str
    forward: Points
    backward: Points

    def seconds(self, size: float, passes: tuple[bool, bool] = (True, True)) -> float:
        """Seconds of forward and backward, those that `passes` says."""
        points = (self.forward, self.backward)
        return sum(interpolated(p, size) for p, wanted in zip(points, passes) if wanted and p)


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
        launch_backward_s: the same of what autograd issues; None for as long.
        host_s: seconds that a model's own code adds to each operation, forward and backward: calls of modules, Python.
        dispatch_s: the same that laying operations over a mesh adds.
        update_s: seconds that an optimizer step takes for each parameter, however small.
        hides_launch: the host issues operations ahead of the device, so that the longer of the two counts.
        hides_communication: collectives run beside compute; False where they take the cores that compute needs.
        interference: part of a rank's compute that a collective in flight beside it takes.
        fused_attention: attention kernels keep no matrix of scores for the backward pass.
        reserved_bytes: memory that is never the model's: context, communication buffers.
        fragmentation: part of what is left that a caching allocator loses to fragments.
        cores: cores of one machine that its ranks share; 0 where each device is a rank's own.
        crowding: (ranks on one machine, how many times longer each computes), ascending.
        work: what was measured of operations, on a machine with one rank.
        collectives: what was measured of collectives.
        slow_nodes: nodes that are worse than what the rest says. A plan gives all ranks as much, so it goes at their pace.

    Raises:
        UsageError: a slow node names a link that there is not.
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
    launch_backward_s: float | None = None
    host_s: float = 0.0
    dispatch_s: float = 0.0
    update_s: float = 0.0
    hides_launch: bool = True
    hides_communication: bool = True
    interference: float = 0.0
    fragmentation: float = 0.0
    cores: int = 0
    crowding: tuple[tuple[int, float], ...] = ()
    work: tuple[MeasuredWork, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    ranks: int = 0

    def __post_init__(self) -> None:
        names = [level.name for level in self.links]
        for slow in self.slow_nodes:
            if slow.link is not None and slow.link not in names:
                raise UsageError(
                    f"slow_nodes: node {slow.node} names the link {slow.link!r}; there are {', '.join(names)}"
                )

    @property
    def usable_bytes(self) -> int:
        """Bytes of one rank's memory that a model may take: all but what is reserved, and the margin for fragments."""
        return int((self.memory_bytes - self.reserved_bytes) * (1.0 - self.fragmentation))

    @property
    def most_ranks(self) -> int | None:
        """Ranks that the outermost level of links joins; None for as many as there are."""
        outer = self.links[-1] if self.links else None
        return None if outer is None else outer.sizes[0] if outer.sizes else outer.size or None

    @property
    def accelerated(self) -> bool:
        """Whether devices are accelerators: those have attention in one kernel, and optimizers that step on all at once."""
        return self.fused_attention

    def shared_core_factors(self, parts: int) -> tuple[float, ...]:
        """How many times as long a rank computes while 1, 2, ..., all of `parts` equal parts of the ranks do, against all.

        Ranks that wait leave the cores that they share to the others. () where ranks have a device of their own, and where
        they are on several machines, each of which has ranks of few parts only, or nobody is slowed.
        """
        if not self.cores or self.ranks > self.devices_per_node:
            return ()
        whole = self._slower(self.ranks)
        found = tuple(self._slower(math.ceil(self.ranks * n / parts)) / whole for n in range(1, parts + 1))
        return found if min(found) < 1 else ()

    @property
    def backward_launch_s(self) -> float:
        """Seconds that the host needs to issue one operation of the backward pass."""
        return self.launch_s if self.launch_backward_s is None else self.launch_backward_s

    def rate(self, dtype: str) -> float:
        """Operations per second that a large matrix product of `dtype` reaches on one rank."""
        return self.flops.get(dtype, self.flops["float32"]) * self.compute_efficiency

    @property
    def streams(self) -> float:
        """Bytes per second that a streaming kernel moves."""
        return self.memory_bandwidth * self.memory_efficiency

    def measured(self, kind: str, dtype: str) -> MeasuredWork | None:
        """What was measured of one kind of work; None where nothing was."""
        return next((m for m in self.work if m.kind == kind and m.dtype == dtype), None)

    def running(self, ranks: int) -> Cluster:
        """The same cluster with `ranks` ranks in all: where ranks share the cores of a machine, each is slower.

        Raises:
            UsageError: its links do not join so many.
        """
        most = self.most_ranks
        if most is not None and ranks > most:
            raise UsageError(
                f"world_size={ranks}, and the links of cluster {self.name!r} join {most} ranks at most (level "
                f"{self.links[-1].name!r}); give fewer ranks, or the cluster an outer level (size 0 for as many ranks as there are)"
            )
        here = min(ranks, self.devices_per_node)
        slower = self._slower(here) / self._slower(min(max(self.ranks, 1), self.devices_per_node))
        slower *= self._slowest(ranks) / self._slowest(self.ranks)
        links = self.links
        if self.slow_nodes:
            links = tuple(
                replace(
                    level,
                    bandwidth_Bps=level.bandwidth_Bps
                    * self._narrowest(level.name, ranks)
                    / self._narrowest(level.name, self.ranks),
                )
                for level in links
            )
        if slower == 1.0:
            return replace(self, ranks=ranks, links=links)

        def longer(points: Points) -> Points:
            return tuple((size, seconds * slower) for size, seconds in points)

        launch = self.launch_backward_s
        return replace(
            self,
            ranks=ranks,
            links=links,
            flops={dtype: rate / slower for dtype, rate in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth / slower,
            launch_s=self.launch_s * slower,
            launch_backward_s=None if launch is None else launch * slower,
            host_s=self.host_s * slower,
            dispatch_s=self.dispatch_s * slower,
            update_s=self.update_s * slower,
            work=tuple(replace(m, forward=longer(m.forward), backward=longer(m.backward)) for m in self.work),
        )

    def nodes(self, ranks: int) -> list[int]:
        """The first rank of each node that `ranks` ranks take up, and `ranks` itself."""
        inner = self.links[0] if self.links else None
        if inner is not None and inner.sizes:
            return inner.groups(ranks)
        return [*range(0, ranks, self.devices_per_node), ranks]

    def slow_among(self, ranks: int) -> list[SlowNode]:
        """The slow nodes that `ranks` ranks take up: they fill nodes in order."""
        used = len(self.nodes(ranks)) - 1 if self.slow_nodes and ranks else 0
        return [slow for slow in self.slow_nodes if slow.node < used]

    def _slowest(self, ranks: int) -> float:
        return max((slow.compute for slow in self.slow_among(ranks)), default=1.0)

    def _narrowest(self, level: str, ranks: int) -> float:
        return min((slow.share for slow in self.slow_among(ranks) if slow.link == level), default=1.0)

    def _slower(self, ranks: int) -> float:
        """How many times longer a rank computes beside `ranks - 1` others, by what was measured; else by cores."""
        if not self.crowding:
            return max(1.0, ranks / self.cores) if self.cores else 1.0
        below = [(n, f) for n, f in self.crowding if n <= ranks] or [self.crowding[0]]
        above = [(n, f) for n, f in self.crowding if n >= ranks]
        (low, least), (high, most) = below[-1], above[0] if above else below[-1]
        if high == low:  # measured, or beyond what was: in proportion
            return least * max(1.0, ranks / low)
        return least + (most - least) * (ranks - low) / (high - low)

    def link(self, stride: int, degree: int) -> Link:
        """The link of a group of `degree` ranks whose ranks are `stride` apart.

        A group that fits in an inner level uses that level. One that spans several inner groups is as fast as the
        outer links of all its members in one inner group together, though never faster than the inner level: each
        device of a node brings its own network card, and a collective uses them all.
        """
        return self.link_over(((stride, degree),))

    def link_over(self, axes: Sequence[tuple[int, int]]) -> Link:
        """The link of a group over the product of several axes, (stride, degree) each, outermost first; see `link`."""
        axes = joined(axes)
        degree = math.prod(d for _, d in axes)
        inside: Link | None = None
        within = 1
        for level in self.links:
            held = members(level, axes, self.ranks)
            if held >= degree or level is self.links[-1]:
                bandwidth = level.bandwidth_Bps
                if inside is not None:
                    bandwidth = min(inside.bandwidth_Bps, bandwidth * within)
                inner = inside if within > 1 else None
                return Link(
                    level.name,
                    level.latency_s,
                    bandwidth,
                    inner,
                    within if inner else 1,
                    level.bandwidth_Bps,
                    self._collectives() if level is self.links[0] else (),
                )
            inside = Link(level.name, level.latency_s, level.bandwidth_Bps, outer_Bps=level.bandwidth_Bps)
            within = held
        raise ValueError(f"cluster {self.name!r} has no links; give at least one LinkLevel")

    def _collectives(self) -> tuple[MeasuredCollective, ...]:
        """Those measured with as many ranks on the machine as there are now, or with the nearest number."""
        here = min(self.ranks or 1, self.devices_per_node)
        found: dict[tuple[str, int], MeasuredCollective] = {}
        for m in self.collectives:
            best = found.get((m.kind, m.degree))
            if best is None or abs(m.ranks - here) < abs(best.ranks - here):
                found[m.kind, m.degree] = m
        return tuple(found.values())
