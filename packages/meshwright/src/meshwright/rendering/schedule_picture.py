"""The picture of a pipeline's schedule."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from meshwright_dtensor.schedule.timetable import DURATION, Timetable

_COLOURS: Mapping[str, str] = MappingProxyType(
    {"F": "tab:blue", "B": "tab:green", "I": "tab:olive", "W": "tab:green"}
)


def draw(table: Timetable, title: str, path: Path) -> None:
    """Write a PNG to `path`, creating its folder: a row for each rank, a box for each forward and backward."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    ranks = len(table.ranks)
    figure = Figure(figsize=(min(24.0, 4 + table.length / 4), 1.2 + 0.45 * ranks), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    small = table.length > 120
    for rank, actions in enumerate(table.ranks):
        for action in actions:
            length, colour = DURATION[action.kind], _COLOURS[action.kind]
            shade = 0.45 + 0.5 * ((action.stage // ranks) % 2)
            start = table.ends[action] - length
            axes.barh(rank, length, left=start, height=0.85, color=colour, alpha=shade, edgecolor="white")
            if not small:
                axes.text(start + length / 2, rank, str(action.microbatch), ha="center", va="center", size=7)
    axes.set_yticks(range(ranks), [f"rank {rank}" for rank in range(ranks)])
    axes.invert_yaxis()
    axes.set_xlabel("time, in forwards of one stage")
    axes.set_title(f"{title}: bubble {100 * table.bubble:.1f}%")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
