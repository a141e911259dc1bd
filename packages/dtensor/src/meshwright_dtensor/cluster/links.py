"""The link between the ranks of one mesh axis, and the time of a collective over it. Torch-free.

A collective is timed by the alpha-beta model (Hockney 1994; Thakur, Rabenseifner and Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005) for each algorithm, and the fastest counts, as NCCL and gloo choose by size. On a
machine that was measured (`meshwright calibrate`), measured times replace the model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""Like other limits of numbers, it is checked where a cluster is read from a file."""

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]


def _ascending(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(low[0] >= high[0] for low, high in pairwise(points)):
        raise ValueError("sizes must ascend")
    return points


Points = Annotated[tuple[tuple[Positive, Positive], ...], AfterValidator(_ascending)]
"""(size, seconds), sizes ascending."""


def interpolated(points: Sequence[tuple[float, float]], size: float) -> float:
    """Seconds at `size` between measured points, both on logarithmic scales.

    Below the first point it is the time of that point (latency), beyond the last point it grows at its rate.
    """
    first, last = points[0], points[-1]
    if size <= first[0]:
        return first[1]
    if size >= last[0]:
        return last[1] * size / last[0]
    for (low, below), (high, above) in pairwise(points):
        if size <= high:
            part = math.log(size / low) / math.log(high / low)
            return below * (above / below) ** part
    return last[1]


@dataclass(frozen=True)
class MeasuredCollective:
    """Times of one kind of collective over `degree` ranks: (bytes of the full tensor, seconds), ascending.

    `ranks`: ranks of the machine that ran it at the same time, in groups of `degree`.
    """

    kind: CollectiveKind
    degree: Annotated[int, Field(ge=2)]
    points: Annotated[Points, Field(min_length=1)]
    ranks: Annotated[int, Field(ge=0)] = 0


@dataclass(frozen=True)
class Protocol:
    """One way in which a communication library sends: short messages want low latency, long ones bandwidth.

    Args:
        start_s: seconds before the first hop, whatever the message.
        hop_s: seconds of a hop.
        share: part of the bandwidth that is left for data; the rest are flags.
    """

    start_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    hop_s: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    share: Annotated[float, Field(gt=0, le=1)] = 1.0


@dataclass(frozen=True)
class Link:
    """The slowest connection that a collective over one mesh axis crosses.

    Args:
        name: name in reports, e.g. "nvlink".
        latency_s: seconds one hop costs before the first byte arrives (alpha).
        bandwidth_Bps: bytes per second that one rank sends, one direction (1 / beta).
        inside: the link between the members of one inner group, if the axis spans several such groups.
        members: ranks of the axis in one inner group; 1 if it spans none.
        outer_Bps: bytes per second that one rank sends between inner groups.
        measured: measured times, used instead of the model.
        protocols: of the library on this link; the fastest counts. () is `latency_s` a hop and the whole bandwidth.
    """

    name: str
    latency_s: float
    bandwidth_Bps: float
    inside: Link | None = None
    members: int = 1
    outer_Bps: float = 0.0
    measured: tuple[MeasuredCollective, ...] = ()
    protocols: tuple[Protocol, ...] = ()

    @property
    def levels(self) -> tuple[str, ...]:
        """Names of the levels of links that it crosses, innermost first."""
        return (*(() if self.inside is None else self.inside.levels), self.name)

    def seconds(self, kind: CollectiveKind, nbytes: float, degree: int) -> float:
        """Seconds of one collective over `degree` ranks, by the fastest algorithm; `nbytes` is the size of the full tensor.

        An all-to-all exchanges what each rank holds, an n-th of the full tensor. A send to the next rank (send_recv)
        moves nbytes, all that one rank sends.
        """
        if degree <= 1:
            return 0.0
        measured = self._measured(kind, nbytes, degree)
        return min(self.algorithms(kind, nbytes, degree).values()) if measured is None else measured

    def algorithms(self, kind: CollectiveKind, nbytes: float, degree: int) -> dict[str, float]:
        """Seconds by algorithm; `seconds` takes the least.

        ring: (n-1)/n of the full tensor passes through every rank in n-1 hops; an all-reduce is two such rounds.
        tree: an all-reduce up and down a double binary tree, the whole tensor each way in log2 n hops (Sanders et al., 2009).
        hierarchical: reduce-scatter inside, the collective between groups on each member's part, all-gather inside.
        """
        if kind == "send_recv":
            return {"send": self._sent(1, nbytes, self.bandwidth_Bps)}
        hops = degree - 1
        moved = nbytes * hops / degree
        # each rank holds an n-th of the tensor, and a network card carries only its own rank's part
        if kind == "all_to_all":
            bandwidth = self.outer_Bps if self.members > 1 else self.bandwidth_Bps
            return {"direct": self._sent(hops, moved / degree, bandwidth)}
        rounds = 2 if kind == "all_reduce" else 1
        seconds = {"ring": self._sent(rounds * hops, rounds * moved, self.bandwidth_Bps)}
        if kind == "all_reduce":
            depth = math.ceil(math.log2(degree))
            seconds["tree"] = self._sent(2 * depth, 2 * nbytes, self.bandwidth_Bps)
        if self.inside is not None and self.members > 1 and degree % self.members == 0:
            between = Link(self.name, self.latency_s, self.outer_Bps, protocols=self.protocols)
            inner = self.inside.seconds("all_gather", nbytes, self.members)
            outer = between.seconds(kind, nbytes / self.members, degree // self.members)
            # an all-reduce scatters inside first and gathers inside last; the others do one of the two
            seconds["hierarchical"] = outer + (2.0 * inner if kind == "all_reduce" else inner)
        return seconds

    def _sent(self, hops: int, nbytes: float, bandwidth: float) -> float:
        """Seconds of `nbytes` through one rank in `hops` hops, by the fastest protocol."""
        if not self.protocols:
            return hops * self.latency_s + nbytes / bandwidth
        # of the hops of a ring over several inner groups, one in `members` crosses this link
        inner = self.inside.protocols if self.inside is not None and self.members > 1 else ()
        within = inner if len(inner) == len(self.protocols) else self.protocols
        return min(
            p.start_s
            + hops * (p.hop_s + (self.members - 1) * q.hop_s) / self.members
            + nbytes / (bandwidth * p.share)
            for p, q in zip(self.protocols, within, strict=True)
        )

    def _measured(self, kind: CollectiveKind, nbytes: float, degree: int) -> float | None:
        """Seconds by the measurement at the nearest degree, in proportion to the bytes that a ring moves."""
        measured = [m for m in self.measured if m.kind == kind]
        if not measured:
            return None
        near = min(measured, key=lambda m: (abs(math.log(m.degree / degree)), m.degree))
        seconds = interpolated(near.points, nbytes)
        if near.degree == degree or kind == "send_recv":
            return seconds
        return seconds * ((degree - 1) / degree) / ((near.degree - 1) / near.degree)
