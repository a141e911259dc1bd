"""The HTML page of a plan."""

from __future__ import annotations

from importlib.resources import files

import jinja2

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.reports.html.drawings import mesh_drawing, timeline
from meshwright_planner.reports.html.tree import tree_of
from meshwright_planner.reports.plan_view import COLOURS, optimality, view_of
from meshwright_planner.reports.upgrades import memory_limit


def page(plan: ParallelPlan, *, cluster: Cluster | None = None, host: PluginHost | None = None) -> str:
    """One HTML page of a plan: parts of time and memory, mesh, timeline, model tree with placements. It loads no other file.

    Args:
        plan: the plan.
        cluster: the cluster that it runs on; None leaves out the timeline and upgrades.
        host: where schedules are found; None discovers what is installed.
    """
    view = view_of(plan, None if cluster is None else cluster.running(plan.world_size), host)
    limit = memory_limit(plan, cluster)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(seconds=human_seconds, bytes=human_bytes)
    template = environment.from_string(
        files("meshwright_planner.reports.html").joinpath("page.html.j2").read_text("utf-8")
    )
    replayed = timeline(plan, cluster, host)
    return template.render(
        plan=plan,
        view=view,
        good=None if plan.predicted is None or plan.predicted.proof is None else optimality(plan.predicted),
        step=view.step_parts(),
        step_size=sum(view.seconds.values()) or 1.0,
        memory=view.memory_parts(),
        memory_size=max(sum(view.memory.values()), limit) or 1,
        limit=limit,
        mesh=mesh_drawing(plan, [] if cluster is None else cluster.nodes(plan.world_size)),
        tree=tree_of(plan),
        rows=replayed.rows,
        whole=replayed.whole,
        notes=replayed.notes,
        colours=COLOURS,
        collectives=sorted(plan.collectives, key=lambda c: -c.count * c.nbytes),
    )
