"""Pictures say what they show: units, limits, colours, and what was clipped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from meshwright import pictures
from meshwright.demo.train import Outcome, Step
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_planner.clusters.registry import DGX_H100


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that would have been written."""
    figures: list[Any] = []
    monkeypatch.setattr(pictures, "_save", lambda figure, *_: figures.append(figure))
    return figures


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def plan_with(total: int) -> ParallelPlan:
    times = [{"forward_seconds": 0.001, "backward_seconds": 0.002}] * 2
    return ParallelPlan.from_dict(
        {
            "world_size": 2,
            "degrees": {"pp": 2},
            "strategies": {"pp": "pipeline"},
            "pipeline": {"stages": [["a"], ["b"]], "schedule": "1f1b", "microbatches": 2},
            "predicted": {
                "step_seconds": 0.01,
                "compute_seconds": 0.006,
                "communication_seconds": 0.001,
                "memory_bytes": {"parameters": total, "total": total},
                "split": {"exposed": {"pp": 0.001}, "stages": times, "bubble_seconds": 0.003},
            },
            "provenance": {"model": "Net-1", "batch": {"rows": 4}, "cluster": "dgx-h100"},
        }
    )


def test_picture_of_a_plan_has_units_a_limit_and_a_legend(drawn: list[Any]) -> None:
    cluster = DGX_H100.running(2)
    pictures.draw_plan(plan_with(int(0.9 * cluster.usable_bytes)), cluster, discover(), Path("plan.png"))
    pictures.draw_plan(plan_with(1 << 20), cluster, discover(), Path("small.png"))
    full, small = drawn
    step, memory, timeline = full.axes
    assert "Net, 4 rows, 2 ranks of dgx-h100" in full.get_suptitle()
    assert step.get_xlabel() == "time of a step in ms" and "pp communication 1 ms" in legend(step)
    assert "GiB" in memory.get_xlabel() and any(text.startswith("limit ") for text in legend(memory))
    assert legend(timeline) == ["forward", "backward", "communication", "optimizer", "waiting (bubble)"]
    assert "in ms" in timeline.get_xlabel()
    # the bar is scaled to use, and the limit is said in words
    assert "MiB" in small.axes[1].get_xlabel() and "times what is used" in small.axes[1].get_xlabel()
    assert small.axes[1].get_xlim()[1] < 2


def test_picture_of_a_schedule_says_what_its_colours_mean(drawn: list[Any]) -> None:
    from meshwright_pipeline.timeline import planned

    split = plan_with(1).to_json().replace('"1f1b"', '"zero-bubble"')
    for plan in (plan_with(1), ParallelPlan.from_json(split)):
        pictures.draw_schedule(planned(plan), "title", Path("schedule.png"))
    assert legend(drawn[0].axes[0]) == ["forward", "backward", "waiting"]
    assert {"backward to inputs", "backward to weights"} <= set(legend(drawn[1].axes[0]))


def test_picture_of_losses_says_what_it_clips(drawn: list[Any]) -> None:
    for differences in ([0.0, 1e-6, 0.0], [1e-6]):
        steps = [Step(n, 4.0 - n, 4.0 - n + d, 1, 0.1) for n, d in enumerate(differences)]
        pictures.draw_losses(Outcome("gpt2", 2, {"dp": 2}, 10**6, steps), Path("losses.png"))
    clipped, whole = (legend(figure.axes[1]) for figure in drawn)
    assert "difference (2 steps below 1e-08, drawn at 1e-08)" in clipped
    assert "difference" in whole
