"""A plan as one HTML page that needs nothing else."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files

import jinja2

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.reports.drawings import Bar, mesh_drawing, timeline
from meshwright_planner.reports.plan_view import COLOURS, memory_limit, name_of, optimality, view_of
from meshwright_planner.reports.rules_tree import tree_of

THIN = 0.002
"""Bars narrower than this part of a step are drawn together, without a text of their own."""

FAR = 2.0
"""How many times the used memory the limit may be, and is still drawn at its place."""


def page(
    plan: ParallelPlan,
    *,
    cluster: Cluster | None = None,
    host: PluginHost | None = None,
    date: str | None = None,
) -> str:
    """One HTML page of a plan: model and batch, why it was chosen, its time and memory, mesh, timeline, and placements.

    The page loads no other file, fits a phone, and follows the light or dark scheme of the reader.

    Args:
        cluster: the cluster that the plan runs on; None leaves out the timeline and upgrades.
        host: where schedules are found; None discovers what is installed.
        date: the day that the page is of, where the plan does not say when it was made; None is today.
    """
    view = view_of(plan, None if cluster is None else cluster.running(plan.world_size), host)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(seconds=si_seconds, bytes=human_bytes)
    source = files("meshwright_planner.reports").joinpath("page.html.j2").read_text("utf-8")
    replayed = timeline(plan, cluster, host)
    notes = plan.provenance.notes
    others = [
        note.removeprefix("also considered: ") for note in notes if note.startswith("also considered: ")
    ]
    return environment.from_string(source).render(
        plan=plan,
        view=view,
        model=model_of(plan),
        configuration=name_of(plan, short=True),
        facts=facts_of(plan, date),
        reasons=[note for note in notes if not note.startswith("also considered: ")],
        others=others,
        good=None if plan.predicted is None or plan.predicted.proof is None else optimality(plan.predicted),
        step=view.step_parts(),
        step_size=sum(view.seconds.values()) or 1.0,
        memory=view.memory_parts(),
        scale=scale_of(sum(view.memory.values()), memory_limit(plan, cluster)),
        mesh=mesh_drawing(plan, [] if cluster is None else cluster.nodes(plan.world_size)),
        tree=tree_of(plan),
        lanes=[lane_of(row) for row in replayed.rows],
        whole=replayed.whole,
        notes=replayed.notes,
        colours=COLOURS,
        collectives=sorted(plan.collectives, key=lambda c: -c.count * c.nbytes),
    )


def si_seconds(seconds: float) -> str:
    """A time with its SI unit; text for terminals writes the prefix as "u"."""
    return human_seconds(seconds).replace("us", "µs")


def model_of(plan: ParallelPlan) -> str:
    """The class of the plan's model; the fingerprint after it is left out."""
    return (plan.provenance.model or "a model").rpartition("-")[0] or plan.provenance.model or "A plan"


def facts_of(plan: ParallelPlan, date: str | None) -> list[tuple[str, str]]:
    """What the plan is for: model, batch, cluster, precision and date."""
    origin = plan.provenance
    rows, tokens = (origin.batch.get(name) for name in ("rows", "tokens"))
    batch = "not recorded" if rows is None else count_of(rows, "row")
    batch += f" of {count_of(tokens, 'token')}" if tokens else ""
    precision = None if plan.precision is None else plan.precision.parameters
    made = "planned" if origin.created else "page written"
    return [
        ("model", origin.model or "not recorded"),
        ("batch", batch),
        (
            "cluster",
            f"{count_of(plan.world_size, 'rank')} of {origin.cluster or 'a cluster that is not recorded'}",
        ),
        *([("precision", precision)] if precision else []),
        ("planner", origin.planner or "written by hand"),
        (made, origin.created or date or datetime.date.today().isoformat()),
    ]


@dataclass(frozen=True)
class Scale:
    """The length of the memory bar in bytes, and where the limit is on it.

    Args:
        length: bytes from the left end to the right end.
        limit: bytes that a rank may use, 0 if unknown.
        times: the limit as a multiple of what is used, if it is too far away to be drawn at its place; else None.
    """

    length: float
    limit: int
    times: float | None


def scale_of(used: int, limit: int) -> Scale:
    """A bar that is scaled to use: as long as the limit if that is near, else a little longer than what is used."""
    if not limit or not used:
        return Scale(float(used or limit or 1), limit, None)
    if limit <= FAR * used:
        return Scale(1.04 * max(used, limit), limit, None)
    return Scale(1.3 * used, limit, limit / used)


@dataclass
class Lane:
    """A row of the timeline: bars with texts, and for each kind one path of all thin bars, in thousandths of the step."""

    bars: list[Bar] = field(default_factory=list)
    paths: dict[str, str] = field(default_factory=dict)


def lane_of(bars: Sequence[Bar]) -> Lane:
    """The lane of a row. A page of a large pipeline has 10,000 bars: as paths they take a tenth of the bytes."""
    lane = Lane()
    for bar in bars:
        if bar.width >= THIN:
            lane.bars.append(bar)
        else:
            piece = f"M{1000 * bar.start:.5g} 0h{1000 * bar.width:.3g}v1h-{1000 * bar.width:.3g}z"
            lane.paths[bar.kind] = lane.paths.get(bar.kind, "") + piece
    return lane
