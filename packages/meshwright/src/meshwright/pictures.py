"""Pictures: a plan, the schedule of a pipeline, and the losses of a run."""

from __future__ import annotations

import textwrap
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.schedule.timetable import DURATION, Timetable
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.names import count_of

if TYPE_CHECKING:
    from meshwright.demo.train import Outcome

_ACTIONS = MappingProxyType({"F": "tab:blue", "B": "tab:green", "I": "tab:olive", "W": "tab:green"})
"""Colours of the actions of a schedule."""


def draw_plan(plan: ParallelPlan, cluster: Cluster | None, host: PluginHost, path: Path) -> None:
    """Where the step goes, where memory goes, and the timeline, which needs the cluster. Raises UsageError."""
    from meshwright_planner.reports.drawings import timeline
    from meshwright_planner.reports.plan_view import COLOURS, memory_limit, view_of

    view = view_of(plan, host=host)
    if plan.predicted is None:
        text = "the plan predicts nothing, so there is nothing to draw; make it with `meshwright plan`"
        raise UsageError(text)
    replayed = timeline(plan, cluster, host)
    bars, whole = replayed.rows, replayed.whole
    figure = _figure(11, 3.4 + (0.9 + 0.28 * len(bars) if bars else 0.0))
    heights = [1, 1, *([0.4 + 0.32 * len(bars)] if bars else [])]
    rows = figure.subplots(len(heights), height_ratios=heights)
    step, size = human_seconds(plan.predicted.step_seconds), human_bytes(plan.predicted.total_bytes)
    title = f"{view.name}: {step} a step, {size} a rank (predicted)"
    figure.suptitle(title, x=0.01, ha="left", fontsize=11)
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
                rows[2].broken_barh(spans, (rank - 0.4, 0.8), color=COLOURS[kind], ec="white", lw=0.2)
        rows[2].set_yticks(range(len(bars)), [f"pp rank {rank}" for rank in range(len(bars))], fontsize=7)
        rows[2].invert_yaxis()
        told = "seconds (replayed on the model of the cluster; white: waiting)"
        notes = (textwrap.fill(f"note: {note}", 130) for note in replayed.notes)
        rows[2].set_xlabel("\n".join((told, *notes)), fontsize=8)
        rows[2].spines[["top", "right"]].set_visible(False)
    _save(figure, path, 130)


def draw_schedule(table: Timetable, title: str, path: Path) -> None:
    """A row for each rank, a box for each forward and backward."""
    ranks = len(table.ranks)
    figure = _figure(min(24.0, 4 + table.length / 4), 1.2 + 0.45 * ranks)
    axes = figure.subplots()
    small = table.length > 120
    for rank, actions in enumerate(table.ranks):
        for action in actions:
            length, colour = DURATION[action.kind], _ACTIONS[action.kind]
            shade = 0.45 + 0.5 * ((action.stage // ranks) % 2)
            start = table.ends[action] - length
            axes.barh(rank, length, left=start, height=0.85, color=colour, alpha=shade, edgecolor="white")
            if not small:
                axes.text(start + length / 2, rank, str(action.microbatch), ha="center", va="center", size=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forwards of one stage")
    axes.set_title(f"{title}: bubble {100 * table.bubble:.1f}%")
    _save(figure, path)


def draw_losses(outcome: Outcome, path: Path) -> None:
    """Both loss curves of a run, and their difference on a logarithmic axis."""
    numbers = [step.step + 1 for step in outcome.steps]
    single, parallel = ([getattr(step, kind) for step in outcome.steps] for kind in ("single", "parallel"))
    figure = _figure(8, 6)
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    upper.plot(numbers, single, linewidth=4, color="0.75", label="one device")
    upper.plot(numbers, parallel, linewidth=1.2, label=f"parallel ({outcome.layout})")
    upper.set_ylabel("loss")
    size = f"{outcome.parameters / 1e6:.1f}M parameters"
    upper.set_title(f"{outcome.model}, {size}, {count_of(outcome.world_size, 'rank')}")
    upper.legend()
    # a difference of zero has no logarithm
    lower.semilogy(numbers, [max(step.difference, 1e-8) for step in outcome.steps], ".-", linewidth=0.8)
    allowed = outcome.tolerance
    lower.axhline(allowed, color="tab:red", linewidth=0.8, linestyle="--", label=f"allowed: {allowed:g}")
    lower.set_ylabel("|difference|")
    lower.set_xlabel("step")
    lower.legend()
    _save(figure, path)


def _figure(width: float, height: float) -> Any:
    """An empty figure in inches, drawn without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path, dpi: int = 120) -> None:
    """Write a picture of the kind that the name ends in, creating its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
