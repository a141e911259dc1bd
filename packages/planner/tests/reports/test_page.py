"""The HTML page of a plan: what is on top, bars, tree, and size."""

from __future__ import annotations

import re

import pytest
from planner_models import HOST, Transformer, eager, tokens

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import explain, profile_model
from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.reports.drawings import Bar
from meshwright_planner.reports.page import lane_of, page, scale_of, si_seconds
from meshwright_planner.reports.plan_view import AXIS_COLOURS, COLOURS, MEMORY_COLOURS, view_of
from meshwright_planner.reports.rules_tree import numbers_of, tree_of


@pytest.fixture(scope="module")
def plan() -> ParallelPlan:
    request = PlanRequest(cluster=DGX_H100, world_size=4)
    (made,) = eager().plan(Transformer(layers=2), tokens(rows=4), request)
    return made


def test_model_batch_cluster_and_date_come_first_and_the_reasons_second(plan: ParallelPlan) -> None:
    text = page(plan, cluster=DGX_H100, host=HOST, date="2026-02-03")
    top, second = re.split("<h2>", text)[:2]
    assert "<h1>Transformer</h1>" in top and str(plan.provenance.model) in top
    assert "4 rows of " in top and "4 ranks of dgx-h100" in top and "2026-02-03" in top
    assert second.startswith("Why this one")
    best, *others = (n for n in plan.provenance.notes if not n.startswith("also considered"))
    assert best[1:] in second and all(note[1:] in second for note in others)
    assert second.index("others considered") > second.index(best[1:])
    made = plan.provenance.model_copy(update={"created": "2025-12-31"})
    dated = page(plan.replace(provenance=made), host=HOST, date="2026-02-03")
    assert "2025-12-31" in dated and "2026-02-03" not in dated


def test_page_has_a_dark_scheme_and_a_phone_layout(plan: ParallelPlan) -> None:
    text = page(plan, cluster=DGX_H100, host=HOST)
    assert "prefers-color-scheme: dark" in text and "max-width: 640px" in text
    # the drawing of the timeline is as wide as the page, and its labels are no part of it
    lanes = text[text.index('<div class="lanes"') :]
    assert "<span>a rank</span><svg" in lanes and "<text" not in lanes


def test_one_colour_has_one_meaning(plan: ParallelPlan) -> None:
    colours = [*COLOURS.values(), *AXIS_COLOURS.values(), *MEMORY_COLOURS.values()]
    assert MEMORY_COLOURS["optimizer"] == COLOURS["optimizer"]
    assert len(set(colours)) == len(colours) - 1
    view = view_of(plan)
    assert len({p.colour for p in view.step_parts()}) == len(view.step_parts())
    assert len({p.colour for p in view.memory_parts()}) == len(view.memory_parts())


def test_memory_bar_is_scaled_to_use_and_marks_the_limit() -> None:
    near, far, over = scale_of(60, 73), scale_of(60, 73_000), scale_of(90, 73)
    assert near.length >= 73 and near.times is None
    assert far.length == pytest.approx(78) and far.times == pytest.approx(73_000 / 60)
    assert over.length >= 90 and over.times is None and over.limit == 73
    assert scale_of(60, 0).length == 60 and scale_of(0, 0).length > 0


@pytest.mark.parametrize(
    ("pattern", "numbers"),
    [
        ("7", {7}),
        ("1[0-3]", {10, 11, 12, 13}),
        ("[25]", {2, 5}),
        ("*", set()),
        ("attn", set()),
        ("h2", set()),
    ],
)
def test_numbers_of_a_pattern(pattern: str, numbers: set[int]) -> None:
    assert numbers_of(pattern) == numbers


def test_tree_names_numbers_and_no_globs_next_to_each_other() -> None:
    call = {"function": "add", "occurrence": 0, "inputs": [{"tp": "P"}], "outputs": [{"tp": "S(1)"}]}
    modules = ("layers.[0-9]", "layers.[0-9][0-9]")
    plan = ParallelPlan.from_dict(
        {
            "world_size": 2,
            "degrees": {"tp": 2},
            "parameters": [{"pattern": "layers.*.weight", "placement": {"tp": "S(0)"}}],
            "activations": [{"module": name, **call} for name in modules],
            "recompute": [{"pattern": f"layers.{n}", "policy": "full"} for n in ("[1-9]", "1[02]", "11")],
        }
    )
    layers = tree_of(plan).inside["layers"]
    assert list(layers.inside) == ["*", "1-12"]
    assert [kind for kind, _ in layers.inside["*"].notes] == ["call"]
    assert list(layers.inside["*"].inside) == ["weight"]


def test_times_have_si_units() -> None:
    assert [si_seconds(s) for s in (2.5, 2.5e-3, 2.5e-5)] == ["2.5 s", "2.5 ms", "25 µs"]


def test_thin_bars_are_one_path() -> None:
    bars = [Bar(i / 1000, 0.001, "forward", "F", "0") for i in range(500)] + [
        Bar(0.5, 0.4, "backward", "B", "0")
    ]
    lane = lane_of(bars)
    assert lane.bars == bars[-1:] and list(lane.paths) == ["forward"]
    assert lane.paths["forward"].count("M") == 500 and len(lane.paths["forward"]) < 500 * 30


def test_reports_are_tables_in_notebooks(plan: ParallelPlan) -> None:
    report = explain([plan, plan], cluster=DGX_H100, host=HOST)
    text = report._repr_html_()
    assert text.count("<tr>") == 3 and text.count("<details>") == 2 and "4 ranks of dgx-h100" in text
    assert "no plans" in explain([])._repr_html_()
    assert "<td" in profile_model(Transformer(layers=2), tokens(rows=4))._repr_html_()
