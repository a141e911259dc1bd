"""Pictures: a plan, the schedule of a pipeline, and the losses of a run."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.schedule.schedule import NAMES
from meshwright_dtensor.schedule.timetable import DURATION, Timetable
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.names import count_of

if TYPE_CHECKING:
    from meshwright.demo.train import Outcome
    from meshwright_planner.reports.drawings import Timeline
    from meshwright_planner.reports.plan_view import Part

_ACTIONS = MappingProxyType({"F": "#3f7fd1", "B": "#4b9b5f", "I": "#a3b83a", "W": "#2f6b45"})
"""Colours of the actions of a schedule. Forwards and whole backwards are as in the timeline of a plan."""

SMALLEST_DIFFERENCE = 1e-8
"""Differences of losses below this are drawn here: zero has no logarithm."""


def draw_plan(plan: ParallelPlan, cluster: Cluster | None, host: PluginHost, path: Path) -> None:
    """Where the step goes, where memory goes, and the timeline, which needs the cluster. Raises UsageError."""
    from meshwright_planner.reports.drawings import timeline
    from meshwright_planner.reports.page import facts_of, model_of, scale_of
    from meshwright_planner.reports.plan_view import memory_limit, name_of, view_of

    view = view_of(plan, host=host)
    if plan.predicted is None:
        text = "the plan predicts nothing, so there is nothing to draw; make it with `meshwright plan`"
        raise UsageError(text)
    replayed = timeline(plan, cluster, host)
    count = len(replayed.rows)
    figure = _figure(11, 4.0 + (1.2 + 0.22 * count if count else 0.0))
    axes = figure.subplots(3 if count else 2, height_ratios=[1, 1, *([1.2 + 0.26 * count] if count else [])])
    step, size = human_seconds(plan.predicted.step_seconds), human_bytes(plan.predicted.total_bytes)
    facts = dict(facts_of(plan, None))
    title = (
        f"{model_of(plan)}, {facts['batch']}, {facts['cluster']}: {step} a step, {size} a rank (predicted)"
    )
    figure.suptitle(
        "\n".join((title, *textwrap.wrap(name_of(plan, short=True), 120))), x=0.01, ha="left", fontsize=10
    )
    scale, unit = time_unit(plan.predicted.step_seconds)
    _stack(axes[0], view.step_parts(), scale, f"time of a step in {unit}")
    length = scale_of(plan.predicted.total_bytes, memory_limit(plan, cluster))
    scale, unit = memory_unit(plan.predicted.total_bytes)
    label = f"memory of the fullest rank in {unit}"
    if length.times is not None:
        label += f" (the limit, {human_bytes(length.limit)}, is {length.times:.0f} times what is used)"
    elif length.limit:
        axes[1].axvline(
            length.limit / scale, color="black", linewidth=1.5, label=f"limit {human_bytes(length.limit)}"
        )
    axes[1].set_xlim(0, length.length / scale)
    _stack(axes[1], view.memory_parts(), scale, label)
    if count:
        _timeline(axes[2], replayed, plan.pipeline is not None)
    _save(figure, path, 130)


def _stack(axes: Any, parts: Sequence[Part], scale: float, label: str) -> None:
    """One horizontal bar of the parts, and their legend."""
    left = 0.0
    for part in parts:
        name = f"{part.name} communication" if part.is_axis else part.name
        # text for terminals writes the prefix as "u"
        size = part.text.replace(" us", " µs")
        axes.barh(0, part.size / scale, left=left, color=part.colour, label=f"{name} {size}")
        left += part.size / scale
    axes.set_yticks([])
    axes.tick_params(labelsize=8)
    axes.set_xlabel(label, fontsize=8)
    axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.1), fontsize=7, frameon=False)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _timeline(axes: Any, replayed: Timeline, pipelined: bool) -> None:
    """The replayed step, a row for each rank of pp, and what its colours mean."""
    from meshwright_planner.reports.plan_view import COLOURS

    rows, (scale, unit) = replayed.rows, time_unit(replayed.whole)
    whole = replayed.whole / scale
    # white edges would hide thin bars
    edge = 0.2 if max(map(len, rows)) < 200 else 0.0
    for rank, row in enumerate(rows):
        axes.broken_barh([(0, whole)], (rank - 0.4, 0.8), color=COLOURS["bubble"], lw=0)
        for kind in {bar.kind for bar in row}:
            spans = [(bar.start * whole, bar.width * whole) for bar in row if bar.kind == kind]
            axes.broken_barh(spans, (rank - 0.4, 0.8), color=COLOURS[kind], ec="white", lw=edge)
    axes.set_yticks(
        range(len(rows)), [f"pp rank {n}" if pipelined else "a rank" for n in range(len(rows))], fontsize=7
    )
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(0, whole)
    axes.tick_params(labelsize=8)
    notes = (textwrap.fill(f"note: {note}", 130) for note in replayed.notes)
    axes.set_xlabel("\n".join((f"time in {unit}, replayed on the model of the cluster", *notes)), fontsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    kinds = ("forward", "backward", "communication", "optimizer", "bubble")
    _legend(axes, {"waiting (bubble)" if kind == "bubble" else kind: COLOURS[kind] for kind in kinds})


def _legend(axes: Any, colours: Mapping[str, str]) -> None:
    """The meaning of each colour, right of the drawing."""
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=name) for name, colour in colours.items()]
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=7, frameon=False)


def time_unit(seconds: float) -> tuple[float, str]:
    """The SI unit of an axis that ends at so many seconds: its length in seconds, and its name."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if seconds >= unit[0]), units[-1])


def memory_unit(size: float) -> tuple[float, str]:
    """The unit of an axis that ends at so many bytes: its bytes, and its name."""
    units = ((2.0**30, "GiB"), (2.0**20, "MiB"), (2.0**10, "KiB"))
    return next((unit for unit in units if size >= unit[0]), units[-1])


def draw_schedule(table: Timetable, title: str, path: Path) -> None:
    """A row for each rank, a box for each forward and backward."""
    ranks = len(table.ranks)
    figure = _figure(min(24.0, 5 + table.length / 4), 1.4 + 0.45 * ranks)
    axes = figure.subplots()
    small = table.length > 120
    for rank, actions in enumerate(table.ranks):
        for action in actions:
            length, colour = DURATION[action.kind], _ACTIONS[action.kind]
            # a rank with two stages: the second one is darker
            shade = 0.55 + 0.45 * ((action.stage // ranks) % 2)
            start = table.ends[action] - length
            axes.barh(rank, length, left=start, height=0.85, color=colour, alpha=shade, edgecolor="white")
            if not small:
                axes.text(start + length / 2, rank, str(action.microbatch), ha="center", va="center", size=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.set_ylim(ranks - 0.5, -0.5)
    axes.set_xlim(0, table.length)
    stages = {action.stage for action in table.ends}
    shades = "; light and dark: the stages of a rank in turn" if len(stages) > ranks else ""
    numbers = "" if small else "; numbers: microbatches"
    axes.set_xlabel(f"time, in forwards of one stage{numbers}{shades}")
    axes.set_title(f"{title}: bubble {100 * table.bubble:.1f}%")
    used = [kind for kind in _ACTIONS if any(action.kind == kind for action in table.ends)]
    _legend(axes, {**{NAMES[kind]: _ACTIONS[kind] for kind in used}, "waiting": "white"})
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
    size = f"{outcome.parameters / 1e6:.1f} million parameters"
    upper.set_title(f"{outcome.model}, {size}, {count_of(outcome.world_size, 'rank')}")
    upper.legend()
    shown = [max(step.difference, SMALLEST_DIFFERENCE) for step in outcome.steps]
    clipped = sum(step.difference < SMALLEST_DIFFERENCE for step in outcome.steps)
    name = "difference"
    if clipped:
        name += (
            f" ({count_of(clipped, 'step')} below {SMALLEST_DIFFERENCE:g}, drawn at {SMALLEST_DIFFERENCE:g})"
        )
    lower.semilogy(numbers, shown, ".-", linewidth=0.8, label=name)
    allowed = outcome.tolerance
    lower.axhline(allowed, color="tab:red", linewidth=0.8, linestyle="--", label=f"allowed: {allowed:g}")
    lower.set_ylabel("|difference|")
    lower.set_xlabel("step")
    lower.xaxis.get_major_locator().set_params(integer=True)
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
