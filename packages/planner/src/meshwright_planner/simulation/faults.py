"""Faults of a cluster: ranks that compute slowly, links that are slow or gone."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from meshwright_dtensor.cluster import Cluster, CollectiveKind
from meshwright_dtensor.errors import InfeasibleError, UsageError
from meshwright_dtensor.utils.names import suggestion


@dataclass(frozen=True)
class Straggler:
    """A rank whose compute takes `slowdown` times as long as that of the others. Raises UsageError: less than 1."""

    rank: int
    slowdown: float

    def __post_init__(self) -> None:
        if not 1 <= self.slowdown < math.inf:
            raise UsageError(
                f"Straggler(rank={self.rank}, slowdown={self.slowdown!r}): it is how many times as long the rank computes; give 1 "
                "or more"
            )


@dataclass(frozen=True)
class LinkFault:
    """A rank whose link of one level has only `share` of its bandwidth; 0: the link is gone.

    Raises UsageError: the share is not 0 to 1.
    """

    rank: int
    level: str
    share: float

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise UsageError(
                f"LinkFault(rank={self.rank}, level={self.level!r}, share={self.share!r}): it is the part of the bandwidth that is "
                "left; give 0 to 1"
            )


_WHERE = r"\s*(?:(?:rank)?\s*(?P<rank>\d+)|node\s*(?P<node>\d+))\s*"
_NUMBER = r"\s*=\s*(?P<number>\d+\.?\d*|\.\d+)\s*"


def parse_straggler(text: str, cluster: Cluster, world_size: int) -> list[Straggler]:
    """Stragglers from "5=1.5" (rank 5) or "node1=1.2" (every rank of a node). Raises UsageError."""
    match = re.fullmatch(rf"{_WHERE}{_NUMBER}x?\s*", text)
    slowdown = float(match["number"]) if match else 0.0
    if match is None or slowdown < 1.0:
        raise UsageError(
            f"--straggler {text} is not RANK=SLOWDOWN with a slowdown of at least 1; write for example 5=1.5 or node1=1.2"
        )
    return [Straggler(rank, slowdown) for rank in _ranks(match, cluster, world_size, f"--straggler {text}")]


def parse_link_fault(text: str, cluster: Cluster, world_size: int) -> list[LinkFault]:
    """Faults from "5:nvlink=0.5" (rank 5's link at half its bandwidth), "node1:infiniband=0" (gone). Raises UsageError."""
    match = re.fullmatch(rf"{_WHERE}:\s*(?P<level>[^=]+?){_NUMBER}", text)
    share = float(match["number"]) if match else 0.0
    if match is None or share > 1.0:
        raise UsageError(
            f"--link-fault {text} is not RANK:LINK=SHARE with a share of 0 to 1; write for example 5:nvlink=0.5, or "
            "node1:infiniband=0 for links that are gone"
        )
    names = [level.name for level in cluster.links]
    if match["level"] not in names:
        raise UsageError(
            f"--link-fault {text}: cluster {cluster.name!r} has no link {match['level']!r} (it has {', '.join(names)})"
            + suggestion(match["level"], names)
        )
    ranks = _ranks(match, cluster, world_size, f"--link-fault {text}")
    return [LinkFault(rank, match["level"], share) for rank in ranks]


def _ranks(match: re.Match[str], cluster: Cluster, world_size: int, option: str) -> range:
    kind = "rank" if match["node"] is None else "node"
    # the first rank of each, and the end
    bounds = range(world_size + 1) if kind == "rank" else cluster.nodes(world_size)
    number = int(match[kind])
    if number + 1 >= len(bounds):
        text = f"{option}: there is no such {kind} among {world_size} ranks; give 0 to {len(bounds) - 2}"
        raise UsageError(text)
    return range(bounds[number], bounds[number + 1])


def collective_seconds(
    cluster: Cluster,
    kind: CollectiveKind,
    nbytes: float,
    spans: Sequence[tuple[int, int]],
    faults: frozenset[tuple[str, float]],
) -> float:
    """Seconds of a collective over axes, (stride, degree) each, that crosses links with these faults, (level, share).

    A link that is too slow is avoided as one that is gone, so no share is slower than a link that is gone. Measured times
    grow as those of the model do.

    Raises InfeasibleError: a link is gone and there is no outer level.
    """
    size = math.prod(degree for _, degree in spans)
    sound = cluster.link_over(spans)
    seconds = sound.seconds(kind, nbytes, size)
    if not faults or not seconds:
        return seconds

    def modelled(machine: Cluster) -> float:
        return replace(machine.link_over(spans), measured=()).seconds(kind, nbytes, size)

    outer = cluster.links[-1].name
    gone = frozenset((level, share if share >= 1 or level == outer else 0.0) for level, share in faults)
    crossing = min(modelled(degraded(cluster, some)) for some in {faults, gone})
    return seconds * crossing / modelled(cluster) if sound.measured else crossing


def degraded(cluster: Cluster, faults: frozenset[tuple[str, float]]) -> Cluster:
    """The cluster for a collective that crosses links with these faults, (level, share).

    Every member sends the same amount, so the worst link sets the pace. The traffic of a link that is gone takes the next
    outer level, and becomes no faster there.

    Raises InfeasibleError: there is no outer level.
    """
    levels = list(cluster.links)
    worst: dict[str, float] = {}
    for level, share in faults:
        worst[level] = min(share, worst.get(level, share))
    # outermost first: the outer level that replaces a link may have a fault itself
    for index, level in reversed([(i, link.name) for i, link in enumerate(levels) if link.name in worst]):
        share = worst[level]
        if share == 0 and index + 1 == len(levels):
            raise InfeasibleError(
                f"the link {level!r} is gone and cluster {cluster.name!r} has none outside of it: a step never ends; "
                "plan for the ranks that can still be reached"
            )
        bandwidth, latency = levels[index].bandwidth_Bps * share, levels[index].latency_s
        protocols = levels[index].protocols
        if share == 0:
            outside = levels[index + 1]
            bandwidth = min(levels[index].bandwidth_Bps, outside.bandwidth_Bps)
            latency, protocols = max(latency, outside.latency_s), outside.protocols or protocols
        levels[index] = replace(
            levels[index], bandwidth_Bps=bandwidth, latency_s=latency, protocols=protocols
        )
    return replace(cluster, links=tuple(levels))
