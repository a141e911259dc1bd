"""A plan as one picture: where the step goes, where memory goes, and the timeline."""

from __future__ import annotations

import textwrap
from pathlib import Path

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost


def draw(plan: ParallelPlan, cluster: Cluster | None, host: PluginHost, path: Path) -> None:
    """Write a PNG to `path`, creating its folder; the timeline needs the cluster.

    Raises:
        UsageError: nothing is predicted of the plan.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from meshwright_dtensor.errors import UsageError
    from meshwright_dtensor.utils.bytesize import human_bytes
    from meshwright_planner.evaluation.candidate import human_seconds
    from meshwright_planner.reports.html.drawings import timeline
    from meshwright_planner.reports.plan_view import COLOURS, view_of
    from meshwright_planner.reports.upgrades import memory_limit

    view = view_of(plan, host=host)
    if plan.predicted is None:
        raise UsageError(
            "the plan predicts nothing, so there is nothing to draw; make it with `meshwright plan`"
        )
    replayed = timeline(plan, cluster, host)
    bars, whole = replayed.rows, replayed.whole
    height = 3.4 + (0.9 + 0.28 * len(bars) if bars else 0.0)
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    rows = figure.subplots(
        3 if bars else 2, height_ratios=[1, 1, *([0.4 + 0.32 * len(bars)] if bars else [])]
    )
    figure.suptitle(
        f"{view.name}: {human_seconds(plan.predicted.step_seconds)} a step, "
        f"{human_bytes(plan.predicted.total_bytes)} a rank (predicted)",
        x=0.01,
        ha="left",
        fontsize=11,
    )
    for axes, parts, unit, label in (
        (rows[0], view.step_parts(), 1, "seconds of a step"),
        (rows[1], view.memory_parts(), 2**30, "GiB of a rank"),
    ):
        left = 0.0
        for part in parts:
            axes.barh(0, part.size / unit, left=left, color=part.colour, label=f"{part.name} {part.text}")
            left += part.size / unit
        axes.set_yticks([])
        axes.set_xlabel(label, fontsize=8)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.1), fontsize=7, frameon=False)
        axes.spines[["top", "right", "left"]].set_visible(False)
    if limit := memory_limit(plan, cluster):
        rows[1].axvline(limit / 2**30, color="black", linewidth=1)
    if bars:
        for rank, row in enumerate(bars):
            for kind in {bar.kind for bar in row}:
                spans = [(bar.start * whole, bar.width * whole) for bar in row if bar.kind == kind]
                rows[2].broken_barh(
                    spans, (rank - 0.4, 0.8), color=COLOURS[kind], edgecolor="white", linewidth=0.2
                )
        rows[2].set_yticks(range(len(bars)), [f"pp rank {rank}" for rank in range(len(bars))], fontsize=7)
        rows[2].invert_yaxis()
        told = "seconds (replayed on the model of the cluster; white: waiting)"
        rows[2].set_xlabel(
            "\n".join((told, *(textwrap.fill(f"note: {note}", 130) for note in replayed.notes))), fontsize=8
        )
        rows[2].spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
