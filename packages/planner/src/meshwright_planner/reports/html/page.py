"""The page: what the template is given."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import jinja2

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.reports.explain import Explained, explain, how_good
from meshwright_planner.reports.html.drawings import mesh_drawing, timeline
from meshwright_planner.reports.html.tree import tree_of
from meshwright_planner.reports.upgrades import memory_limit

COLOURS = {
    "compute": "#3b6ea5",
    "forward": "#3b6ea5",
    "backward": "#5b9a68",
    "communication": "#c8823b",
    "bubble": "#c9c9c9",
    "optimizer": "#80679b",
}
PALETTE = ("#c8823b", "#b5533c", "#d7a94b", "#96703f", "#cf8f7d", "#a8a13a")
MEMORY = ("#3b6ea5", "#5b9a68", "#c8823b", "#80679b", "#b5533c", "#7d7d7d", "#d7a94b")


def page(plan: ParallelPlan, *, cluster: Cluster | None = None, host: PluginHost | None = None) -> str:
    """One HTML page of a plan: model tree with placements, mesh, where time and memory go, timeline. It loads nothing.

    Args:
        plan: what is shown.
        cluster: what it runs on; None leaves out the timeline and what to buy.
        host: where schedules are found; None discovers what is installed.
    """
    (explained,) = explain(plan, cluster=cluster, host=host).plans
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(seconds=human_seconds, bytes=human_bytes)
    template = environment.from_string(
        files("meshwright_planner.reports.html").joinpath("page.html.j2").read_text("utf-8")
    )
    replayed = timeline(plan, cluster, host)
    return template.render(
        plan=plan,
        explained=explained,
        good=None if plan.predicted is None or plan.predicted.proof is None else how_good(plan.predicted),
        parts=_parts(explained),
        memory=_memory(explained, memory_limit(plan, cluster)),
        limit=memory_limit(plan, cluster),
        mesh=mesh_drawing(plan, [] if cluster is None else cluster.nodes(plan.world_size)),
        tree=tree_of(plan),
        rows=replayed.rows,
        whole=replayed.whole,
        notes=replayed.notes,
        colours=COLOURS,
        collectives=sorted(plan.collectives, key=lambda c: -c.count * c.nbytes),
    )


def _parts(explained: Explained) -> list[dict[str, Any]]:
    """Parts of the step with their colours."""
    whole = sum(explained.seconds.values()) or 1.0
    axes = [part for part in explained.seconds if part not in COLOURS]
    colours = {**COLOURS, **{axis: PALETTE[i % len(PALETTE)] for i, axis in enumerate(axes)}}
    return [
        {
            "name": part if part not in axes else f"{part} communication",
            "seconds": seconds,
            "share": seconds / whole,
            "colour": colours[part],
        }
        for part, seconds in explained.seconds.items()
        if seconds
    ]


def _memory(explained: Explained, limit: int) -> list[dict[str, Any]]:
    """Parts of the memory with their colours, as shares of the limit, or of all where it is exceeded or not known."""
    total = sum(explained.memory.values())
    whole = max(total, limit) or 1
    by_size = sorted(explained.memory.items(), key=lambda item: (-item[1], item[0]))
    return [
        {"name": part, "bytes": size, "share": size / whole, "colour": MEMORY[i % len(MEMORY)]}
        for i, (part, size) in enumerate(by_size)
        if size
    ]
