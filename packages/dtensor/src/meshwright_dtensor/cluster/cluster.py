"""A cluster as numbers: devices, memory, rates and links. Torch-free, so that plans can be made without a device.

Rates are the vendor's peaks; `compute_efficiency` and `memory_efficiency` are the fractions that kernels reach, and
`reserved_bytes` is the memory of the runtime. A machine that was measured (`meshwright calibrate`) also has the measured times
of operations and collectives by size.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain, pairwise, product, repeat, takewhile
from typing import Annotated

from pydantic import Field

from meshwright_dtensor.cluster.chip import Chip
from meshwright_dtensor.cluster.links import (
    Link,
    MeasuredCollective,
    Points,
    Positive,
    Protocol,
    interpolated,
)
from meshwright_dtensor.errors import UsageError

NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Natural = Annotated[int, Field(ge=0)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Part = Annotated[float, Field(ge=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]


@dataclass(frozen=True)
class LinkLevel:
    """One level of the network, innermost first.

    Args:
        name: e.g. "nvlink".
        size: number of ranks that this level connects; 0 for "as many as there are" (the outermost level).
        latency_s: seconds of one hop before the first byte arrives.
        bandwidth_Bps: bytes per second that ONE rank sends in one direction.
        sizes: ranks in each group of this level in rank order, where they are not all `size`; the last repeats.
        protocols: how the communication library sends here, the fastest for each message; () for `latency_s` a hop alone.
    """

    name: str
    size: Natural
    latency_s: NotNegative
    bandwidth_Bps: Positive
    sizes: tuple[Count, ...] = ()
    protocols: tuple[Protocol, ...] = ()

    def starts(self) -> Iterator[int]:
        """The first rank of each group of this level, without end; 0 alone where it joins all ranks."""
        if not self.sizes and not self.size:
            return iter((0,))
        last = self.sizes[-1] if self.sizes else self.size
        return accumulate(chain(self.sizes, repeat(last)), initial=0)

    def groups(self, ranks: int) -> list[int]:
        """The first rank of each group of this level among `ranks` ranks, and `ranks` itself."""
        return [*takewhile(lambda rank: rank < ranks, self.starts()), ranks]

    def begins_at(self, rank: int) -> bool:
        """Whether `rank` is the first of a group of this level."""
        if not self.sizes:
            return rank % self.size == 0 if self.size else rank == 0
        named = sum(self.sizes)
        if rank > named:
            return (rank - named) % self.sizes[-1] == 0
        return rank in (0, *accumulate(self.sizes))

    def members(self, stride: int, degree: int, ranks: int) -> int:
        """The fewest ranks of an axis group (`degree` ranks with this `stride`) in one group of this level; `degree` if
        all are in one.

        Groups of an axis are consecutive, so a group may cross a boundary if sizes do not divide.
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


def merge_axes(axes: Sequence[tuple[int, int]]) -> Spans:
    """The same group with the fewest axes: adjacent axes are merged, axes of one rank are dropped."""
    merged: list[tuple[int, int]] = []
    for stride, degree in axes:
        if merged and merged[-1][0] == stride * degree:
            merged[-1] = stride, merged[-1][1] * degree
        elif degree > 1:
            merged.append((stride, degree))
    return tuple(merged) or ((1, 1),)


@lru_cache(maxsize=4096)
def members(level: LinkLevel, axes: Spans, ranks: int) -> int:
    """The fewest ranks of a group over these axes (see `merge_axes`) in one group of a level; all if they are in one."""
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
    # each group may cross other boundaries
    for first in range(ranks):
        if first + offsets[-1] < ranks and not any(first // s % d for s, d in axes):
            held = Counter(bisect_right(bounds, first + offset) for offset in offsets)
            fewest = min(fewest, *held.values())
    return fewest


@dataclass(frozen=True)
class SlowNode:
    """A node that is slower than the others.

    Args:
        node: its number, from 0.
        compute: factor on the compute time of its ranks.
        link: name of a level whose bandwidth is only `share` there; None for none.
        share: fraction of that level's bandwidth.

    Raises UsageError: a number is out of range, or there is a share of no link.
    """

    node: Natural
    compute: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 1.0
    link: str | None = None
    share: Share = 1.0

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
    """Measured times of one kind of work on one rank, launch included: (size, seconds) of forward and of backward.

    Args:
        kind: "matmul" and "attention", by floating-point operations of the forward pass; others by bytes moved.
        dtype: e.g. "float32".
    """

    kind: str
    dtype: str
    forward: Annotated[Points, Field(min_length=1)]
    backward: Points = ()

    def seconds(self, size: float, passes: tuple[bool, bool] = (True, True)) -> float:
        """Seconds of (forward, backward), as `passes` selects."""
        points = (self.forward, self.backward)
        return sum(interpolated(p, size) for p, wanted in zip(points, passes) if wanted and p)


@dataclass(frozen=True)
class Cluster:
    """Equal devices connected by levels of links; all numbers are per rank, with one rank per device.

    Args:
        name: as in the plugin record.
        devices_per_node: ranks in one node.
        memory_bytes: memory of one rank.
        flops: dtype name ("float32", "bfloat16", ...) -> peak dense operations per second of one rank; other dtypes run
            at the rate of "float32".
        memory_bandwidth: bytes per second between one rank's memory and its cores.
        links: levels of the network, innermost first.
        source: where the numbers come from.
        compute_efficiency: share of the peak that a large matrix product reaches.
        memory_efficiency: share of `memory_bandwidth` that a streaming kernel reaches.
        launch_s: host seconds to launch one operation in eager mode.
        launch_backward_s: the same for operations of autograd; None for the same time.
        host_s: host seconds that the model's Python code adds to each operation, forward and backward.
        dispatch_s: host seconds that dispatch over a mesh adds to each operation.
        update_s: seconds of an optimizer step per parameter, whatever its size.
        hides_launch: the host runs asynchronously to the device, so that the longer of the two counts.
        hides_communication: collectives overlap with compute; False if they use the cores that compute needs.
        interference: fraction of a rank's compute that a concurrent collective takes.
        fused_attention: attention kernels save no matrix of scores for the backward pass.
        reserved_bytes: memory that the model cannot use: context, communication buffers.
        fragmentation: fraction of the rest that a caching allocator loses to fragments.
        cores: cores of one machine that its ranks share; 0 if each rank has a device of its own.
        crowding: (ranks on one machine, factor on the compute time of each), ascending.
        work: measured operations, on a machine with one rank.
        collectives: measured collectives.
        slow_nodes: nodes that are slower than these numbers. All ranks get equal work, so a plan runs at their pace.
        chip: the processor of an accelerator, by which the time of a product depends on its shape; None: only on its FLOPs.

    Raises UsageError: a slow node names an unknown link.
    """

    name: Text
    devices_per_node: Count
    memory_bytes: Count
    flops: Mapping[str, Positive]
    memory_bandwidth: Positive
    links: Annotated[tuple[LinkLevel, ...], Field(min_length=1)]
    source: Text
    compute_efficiency: Share = 0.6
    memory_efficiency: Share = 0.8
    launch_s: NotNegative = 5e-6
    reserved_bytes: Natural = 0
    fused_attention: bool = True
    launch_backward_s: NotNegative | None = None
    host_s: NotNegative = 0.0
    dispatch_s: NotNegative = 0.0
    update_s: NotNegative = 0.0
    hides_launch: bool = True
    hides_communication: bool = True
    interference: Part = 0.0
    fragmentation: Part = 0.0
    cores: Natural = 0
    crowding: tuple[tuple[Count, Annotated[float, Field(ge=1)]], ...] = ()
    work: tuple[MeasuredWork, ...] = ()
    collectives: tuple[MeasuredCollective, ...] = ()
    slow_nodes: tuple[SlowNode, ...] = ()
    chip: Chip | None = None
    ranks: int = 0

    def __post_init__(self) -> None:
        names = [level.name for level in self.links]
        for slow in self.slow_nodes:
            if slow.link is not None and slow.link not in names:
                text = (
                    f"slow_nodes: node {slow.node} names the link {slow.link!r}; there are {', '.join(names)}"
                )
                raise UsageError(text)

    @property
    def usable_bytes(self) -> int:
        """Bytes of one rank's memory for a model: without the reserve and the margin for fragments."""
        return int((self.memory_bytes - self.reserved_bytes) * (1.0 - self.fragmentation))

    @property
    def most_ranks(self) -> int | None:
        """The most ranks that the outermost level of links connects; None for no limit."""
        outer = self.links[-1] if self.links else None
        return None if outer is None else outer.sizes[0] if outer.sizes else outer.size or None

    @property
    def accelerated(self) -> bool:
        """Whether devices are accelerators, with fused attention and optimizers that update all parameters at once."""
        return self.fused_attention

    def shared_core_factors(self, parts: int) -> tuple[float, ...]:
        """Compute-time factors while 1, 2, ..., all of `parts` equal parts of the ranks compute, relative to all.

        Ranks that wait leave their cores to the others. () if each rank has a device of its own, if ranks are on several
        machines (each has ranks of few parts only), or if sharing slows nobody.
        """
        if not self.cores or self.ranks > self.devices_per_node:
            return ()
        whole = self._slower(self.ranks)
        factors = tuple(self._slower(math.ceil(self.ranks * n / parts)) / whole for n in range(1, parts + 1))
        return factors if min(factors) < 1 else ()

    @property
    def backward_launch_s(self) -> float:
        """Host seconds to launch one operation of the backward pass."""
        return self.launch_s if self.launch_backward_s is None else self.launch_backward_s

    def rate(self, dtype: str) -> float:
        """Operations per second that a large matrix product of `dtype` reaches on one rank."""
        return self.flops.get(dtype, self.flops["float32"]) * self.compute_efficiency

    @property
    def streams(self) -> float:
        """Bytes per second that a streaming kernel moves."""
        return self.memory_bandwidth * self.memory_efficiency

    def measured(self, kind: str, dtype: str) -> MeasuredWork | None:
        """The measurement of one kind of work, or None."""
        return next((m for m in self.work if m.kind == kind and m.dtype == dtype), None)

    def running(self, ranks: int) -> Cluster:
        """The same cluster with `ranks` ranks in all, slower if they share cores. Raises UsageError if its links connect fewer."""
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
            shares = [(self._narrowest(x.name, ranks), self._narrowest(x.name, self.ranks)) for x in links]
            links = tuple(
                replace(level, bandwidth_Bps=level.bandwidth_Bps * share / before)
                for level, (share, before) in zip(links, shares, strict=True)
            )
        if slower == 1.0:
            return replace(self, ranks=ranks, links=links)

        def longer(points: Points) -> Points:
            return tuple((size, seconds * slower) for size, seconds in points)

        launch, chip = self.launch_backward_s, self.chip
        return replace(
            self,
            ranks=ranks,
            links=links,
            flops={dtype: rate / slower for dtype, rate in self.flops.items()},
            memory_bandwidth=self.memory_bandwidth / slower,
            chip=None if chip is None else replace(chip, fill_s=chip.fill_s * slower),
            launch_s=self.launch_s * slower,
            launch_backward_s=None if launch is None else launch * slower,
            host_s=self.host_s * slower,
            dispatch_s=self.dispatch_s * slower,
            update_s=self.update_s * slower,
            work=tuple(replace(m, forward=longer(m.forward), backward=longer(m.backward)) for m in self.work),
        )

    def nodes(self, ranks: int) -> list[int]:
        """The first rank of each node of `ranks` ranks, and `ranks` itself."""
        inner = self.links[0] if self.links else None
        if inner is not None and inner.sizes:
            return inner.groups(ranks)
        return [*range(0, ranks, self.devices_per_node), ranks]

    def slow_among(self, ranks: int) -> list[SlowNode]:
        """The slow nodes among those of `ranks` ranks, which fill nodes in order."""
        used = len(self.nodes(ranks)) - 1 if self.slow_nodes and ranks else 0
        return [slow for slow in self.slow_nodes if slow.node < used]

    def _slowest(self, ranks: int) -> float:
        return max((slow.compute for slow in self.slow_among(ranks)), default=1.0)

    def _narrowest(self, level: str, ranks: int) -> float:
        return min((slow.share for slow in self.slow_among(ranks) if slow.link == level), default=1.0)

    def _slower(self, ranks: int) -> float:
        """The factor on compute time with `ranks` ranks on a machine: measured, else by cores."""
        if not self.crowding:
            return max(1.0, ranks / self.cores) if self.cores else 1.0
        below = [(n, f) for n, f in self.crowding if n <= ranks] or [self.crowding[0]]
        above = [(n, f) for n, f in self.crowding if n >= ranks]
        (low, least), (high, most) = below[-1], above[0] if above else below[-1]
        # measured, or in proportion beyond the measurements
        if high == low:
            return least * max(1.0, ranks / low)
        return least + (most - least) * (ranks - low) / (high - low)

    def link(self, stride: int, degree: int) -> Link:
        """The link of a group of `degree` ranks with this `stride`.

        A group inside of an inner level uses that level. A group over several inner groups has the bandwidth of the outer
        links of all its members in one inner group together, at most that of the inner level: each device of a node has a
        network card, and a collective uses all of them.
        """
        return self.link_over(((stride, degree),))

    def link_over(self, axes: Sequence[tuple[int, int]]) -> Link:
        """The link of a group over the product of several axes, (stride, degree) each, outermost first; see `link`."""
        axes = merge_axes(axes)
        degree = math.prod(d for _, d in axes)
        inside: Link | None = None
        within = 1
        for level in self.links:
            held = members(level, axes, self.ranks)
            if held >= degree or level is self.links[-1]:
                bandwidth = level.bandwidth_Bps
                inner, count = (inside, within) if inside is not None and within > 1 else (None, 1)
                # with one member in each inner group, nothing crosses the inner links
                if inner is not None:
                    bandwidth = min(inner.bandwidth_Bps, bandwidth * count)
                measured = self._collectives() if level is self.links[0] else ()
                latency, outer = level.latency_s, level.bandwidth_Bps
                return Link(level.name, latency, bandwidth, inner, count, outer, measured, level.protocols)
            inside = Link(
                level.name,
                level.latency_s,
                level.bandwidth_Bps,
                outer_Bps=level.bandwidth_Bps,
                protocols=level.protocols,
            )
            within = held
        raise ValueError(f"cluster {self.name!r} has no links; give at least one LinkLevel")

    def _collectives(self) -> tuple[MeasuredCollective, ...]:
        """The measurements with this number of ranks on the machine, or with the nearest number."""
        here = min(self.ranks or 1, self.devices_per_node)
        nearest: dict[tuple[str, int], MeasuredCollective] = {}
        for m in sorted(self.collectives, key=lambda m: abs(m.ranks - here)):
            nearest.setdefault((m.kind, m.degree), m)
        return tuple(nearest.values())
