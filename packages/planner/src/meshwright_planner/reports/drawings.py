"""Coordinates of the drawings of a plan: the mesh and the timeline."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_planner.simulation.events import Span
from meshwright_planner.simulation.replay import simulate

MOST_RANKS = 64
MOST_SPANS = 6000


@dataclass(frozen=True)
class Box:
    """A rectangle with a label. level: depth of nesting; text: shown on hover."""

    x: float
    y: float
    width: float
    height: float
    label: str
    level: int
    text: str = ""


@dataclass(frozen=True)
class MeshDrawing:
    """Ranks as nested boxes, one level for each axis. left_out: the number of ranks that are not drawn."""

    boxes: list[Box]
    width: float
    height: float
    left_out: int


def mesh_drawing(plan: ParallelPlan, nodes: Sequence[int] = ()) -> MeshDrawing:
    """The mesh of a plan with the outermost axis as outermost box, at most MOST_RANKS ranks: the first along each axis.

    nodes: the first rank of each node, to name the node of a rank; () where it is not known.
    """
    axes = [(axis, degree) for axis, degree in plan.degrees.items() if degree > 1]
    # the ranks that are drawn along each axis, the inner axes first
    shown = [1] * len(axes)
    for level, (_, degree) in reversed(list(enumerate(axes))):
        shown[level] = max(1, min(degree, 16, MOST_RANKS // math.prod(shown)))
    cell, gap, head = 34.0, 8.0, 16.0
    boxes: list[Box] = []

    def draw(level: int, x: float, y: float, first: int, stride: int) -> tuple[float, float]:
        if level == len(axes):
            where = f", node {bisect.bisect_right(nodes, first) - 1}" if nodes else ""
            boxes.append(Box(x, y, cell, cell, str(first), level, f"rank {first}{where}"))
            return cell, cell
        axis, degree = axes[level]
        inner = stride // degree
        across = (len(axes) - level) % 2 == 1
        at_x, at_y, wide, high = x + gap, y + head, 0.0, 0.0
        index = len(boxes)
        for place in range(shown[level]):
            w, h = draw(level + 1, at_x, at_y, first + place * inner, inner)
            wide, high = max(wide, at_x + w - x), max(high, at_y + h - y)
            at_x, at_y = (at_x + w + gap, at_y) if across else (at_x, at_y + h + gap)
        label = f"{axis} {degree}"
        if shown[level] < degree:
            label += f" ({shown[level]} drawn)"
        wide = max(wide + gap, 6.2 * len(label) + 2 * gap)
        boxes.insert(index, Box(x, y, wide, high + gap, label, level, f"{axis}: {degree} ranks"))
        return wide, high + gap

    width, height = draw(0, 0.0, 0.0, 0, plan.world_size)
    return MeshDrawing(boxes, width, height, plan.world_size - math.prod(shown))


@dataclass(frozen=True)
class Bar:
    """A bar of a timeline: start and width as parts of the step; kind as in Span, with compute split into forward and backward."""

    start: float
    width: float
    kind: str
    text: str
    label: str


@dataclass(frozen=True)
class Timeline:
    """A replayed step: bars for every rank along pp, its seconds, and notes on what the replay leaves out."""

    rows: list[list[Bar]] = field(default_factory=list)
    whole: float = 0.0
    notes: tuple[str, ...] = ()


def timeline(plan: ParallelPlan, cluster: Cluster | None, host: PluginHost | None = None) -> Timeline:
    """The step of a plan, replayed on the model of its cluster; empty without a cluster or without a predicted split."""
    if cluster is None or plan.predicted is None or plan.predicted.split is None:
        return Timeline()
    replayed = simulate(plan, cluster, host=host)
    spans = replayed.timelines
    whole = max((span.end for row in spans for span in row), default=0.0)
    if not whole:
        return Timeline(notes=replayed.notes)
    thin = sum(map(len, spans)) > MOST_SPANS
    rows = [[_bar(span, whole) for span in _merged(row, thin) if span.kind != "wait"] for row in spans]
    return Timeline(rows, whole, replayed.notes)


def _bar(span: Span, whole: float) -> Bar:
    kind, label, text = span.kind, "", f"{span.what}: {span.seconds * 1e3:.3g} ms"
    if kind == "compute":
        kind = "forward" if span.what.startswith("F") else "backward"
        label = span.what[1:].partition(" ")[0]
    return Bar(span.start / whole, span.seconds / whole, kind, text, label)


def _merged(row: Iterable[Span], thin: bool) -> list[Span]:
    """Joins adjacent pieces of one forward or backward; if `thin`, also adjacent spans of one kind."""
    merged: list[Span] = []
    for span in row:
        last = merged[-1] if merged else None
        same = last is not None and (last.kind, last.what) == (span.kind, span.what)
        if thin and last is not None:
            same = last.kind == span.kind and last.what[:1] == span.what[:1]
        if last is not None and same and last.end == span.start:
            merged[-1] = Span(last.start, span.end, last.what, last.kind)
        else:
            merged.append(span)
    return merged
