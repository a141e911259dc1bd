"""Reports: where time and memory go, what to buy next, why not another degree, the page."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, ClassVar

import pytest
from planner_models import HOST, Transformer, eager, tokens

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.strategy import PlanRequest
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_planner import explain
from meshwright_planner.clusters.file import write
from meshwright_planner.clusters.registry import DGX_H100
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import EagerPlanner, default_rules
from meshwright_planner.reports.infeasible import infeasible
from meshwright_planner.reports.page import page
from meshwright_planner.reports.plan_view import memory_limit, upgrades
from meshwright_planner.reports.why_not import parse_pins, why_not


@pytest.fixture(scope="module")
def model() -> Transformer:
    return Transformer(layers=2)


def request(**options: Any) -> PlanRequest:
    return PlanRequest(cluster=DGX_H100, world_size=4, **options)


@pytest.fixture(scope="module")
def plans(model: Transformer) -> list[ParallelPlan]:
    return eager().plan(model, tokens(rows=4), request(top_k=3))


def test_infeasible_error_without_a_candidate_is_readable(model: Transformer) -> None:
    """A planner whose every plan was refused has none to show."""
    search = Search(eager().setting(model, tokens(rows=4), request(), HOST), default_rules())
    assert "each of the plans that were tried was refused" in str(infeasible(search, []))


def test_parts_of_the_step_add_up(plans: list[ParallelPlan]) -> None:
    for explained in explain(plans).plans:
        predicted = explained.plan.predicted
        assert predicted is not None and predicted.split is not None
        assert sum(explained.seconds.values()) == pytest.approx(predicted.step_seconds)
        assert sum(predicted.split.exposed.values()) == pytest.approx(predicted.communication_seconds)
        assert sum(explained.memory.values()) == predicted.total_bytes


def test_a_brief_report_is_one_screen_and_ends_with_the_figures(plans: list[ParallelPlan]) -> None:
    report = explain(plans, cluster=DGX_H100, host=HOST, what_to_buy=False)
    lines, best = report.brief().splitlines(), plans[0].predicted
    assert best is not None and len(lines) < 40
    assert lines[-1].startswith(f"{human_seconds(best.step_seconds)} a step, ") and " tokens/s, " in lines[-1]
    assert not report.plans[0].upgrades and explain(plans, cluster=DGX_H100, host=HOST).plans[0].upgrades


def test_report_data_equals_text(plans: list[ParallelPlan]) -> None:
    report = explain(plans, cluster=DGX_H100, host=HOST)
    data = json.loads(json.dumps(report.to_dict()))
    assert [p["degrees"] for p in data["plans"]] == [dict(p.degrees) for p in plans]
    text = " ".join(str(report).split())
    for entry in data["plans"]:
        assert entry["name"] in text and entry["next_to_buy"] in text


def test_table_shows_measured_next_to_predicted_time(plans: list[ParallelPlan]) -> None:
    first, *others = plans
    measured = first.provenance.model_copy(update={"measured_seconds": 0.0123})
    tried = ParallelPlan.from_json(first.replace(provenance=measured).to_json())
    assert tried.provenance.measured_seconds == 0.0123
    report = explain([*others, tried])
    lines = str(report).splitlines()
    assert any("measured" in line.split() for line in lines)
    first_row, last_row = (next(line for line in lines if line.startswith(f" {n} ")) for n in (1, len(plans)))
    assert " -  " in first_row and "12.3 ms" in last_row
    assert [entry["measured_seconds"] for entry in report.to_dict()["plans"]] == [
        *[None] * len(others),
        0.0123,
    ]
    assert "measured" not in str(explain(plans))


def test_table_has_columns_for_options_that_differ(plans: list[ParallelPlan]) -> None:
    def head(*shown: ParallelPlan) -> str:
        return " ".join(str(explain(shown)).partition("──")[0].split())

    def piped(schedule: str, microbatches: int) -> ParallelPlan:
        rule = {"stages": [["a"], ["b"]], "schedule": schedule, "microbatches": microbatches}
        return ParallelPlan.from_dict(
            {
                **json.loads(first.to_json()),
                "world_size": 2,
                "degrees": {"pp": 2},
                "strategies": {"pp": "pipeline"},
                "pipeline": rule,
            }
        )

    first = plans[0].replace(parameters=(), activations=(), collectives=(), sequence_parallel=False)
    full = first.replace(recompute=({"pattern": "layers.*", "policy": "full"},))
    split = first.replace(sequence_parallel=True)
    for title in ("recompute", "schedule", "batches", "stage", "sequence", "context"):
        assert title not in head(first), title
    assert "recompute" in head(first, full) and "recompute" in head(full)
    assert "sequence" in head(first, split) and "sequence" not in head(split, split)
    several = str(explain([piped("1f1b", 2), piped("gpipe", 4)]))
    assert "schedule" in several and "micro-" in several and "batches" in several
    rows = [line.split() for line in several.splitlines() if line.startswith((" 1 ", " 2 "))]
    assert [row[2:4] for row in rows] == [["1f1b", "2"], ["gpipe", "4"]]


def test_table_is_never_cut_off(plans: list[ParallelPlan]) -> None:
    for width in (20, 80, 110):
        text = str(explain(plans, width=width))
        table = text[: text.index("1. ")]
        assert "…" not in table and human_bytes(plans[0].predicted.total_bytes) in table  # type: ignore[union-attr]
        assert table == str(explain(plans, width=300)).partition("1. ")[0]


def test_explain_accepts_a_cluster_like_plan(plans: list[ParallelPlan], tmp_path: Path) -> None:
    write(DGX_H100, tmp_path / "own.json")
    wanted = explain(plans, cluster=DGX_H100.running(4), host=HOST).to_dict()
    assert wanted["plans"][0]["upgrades"]
    for cluster in ("dgx-h100", tmp_path / "own.json", str(tmp_path / "own.json"), DGX_H100):
        host = HOST if isinstance(cluster, Path) or cluster == str(tmp_path / "own.json") else None
        assert explain(plans, cluster=cluster, host=host).to_dict() == wanted
    with pytest.raises(PluginError, match="did you mean 'dgx-h100'"):
        explain(plans, cluster="dgx-h10")
    with pytest.raises(UsageError, match="cluster=8 is of type int"):
        explain(plans, cluster=8)  # type: ignore[arg-type]


def by_hand(compute: float, tp: float) -> ParallelPlan:
    """Half of the exchange is bandwidth that can be bought; latency is none of it."""
    free = DGX_H100.link(1, 4).seconds("all_reduce", 10**9, 4)
    uses = [{"axis": "tp", "kind": "all_reduce", "nbytes": 10**9, "count": round(tp / free)}]
    exposed = round(tp / free) * free
    return ParallelPlan.from_dict(
        {
            "world_size": 4,
            "degrees": {"tp": 4},
            "collectives": uses,
            "predicted": {
                "step_seconds": compute + exposed,
                "compute_seconds": compute,
                "communication_seconds": exposed,
                "split": {"exposed": {"tp": exposed}},
            },
        }
    )


@pytest.mark.parametrize(
    ("size", "cell", "noted"), [(0, "none*", True), (None, "-", False), (1 << 20, "1.0 MiB", False)]
)
def test_activations_in_table_and_text(
    plans: list[ParallelPlan], size: int | None, cell: str, noted: bool
) -> None:
    """None at the peak, unknown, or so many."""
    plan = plans[0]
    assert plan.predicted is not None
    memory = {part: n for part, n in plan.predicted.memory_bytes.items() if part != "activations"}
    memory |= {} if size is None else {"activations": size}
    other = plan.replace(predicted=plan.predicted.model_copy(update={"memory_bytes": memory}))
    text = str(explain(other, width=160))
    row = next(line for line in text.splitlines() if line.strip().startswith("1 "))
    assert f" {cell} " in row and " 0 B " not in row
    assert ("*none: memory is fullest when no activations are kept" in text) == noted


def test_upgrades_and_next_to_buy() -> None:
    slow, talks = by_hand(10.0, 1.0), by_hand(1.0, 10.0)
    assert upgrades(slow, DGX_H100, HOST)[0].what == "devices twice as fast"
    best = upgrades(talks, DGX_H100, HOST)
    assert best[0].what.startswith(DGX_H100.links[0].name) and best[0].seconds == pytest.approx(6.0, rel=1e-2)
    assert [u.saved for u in best if u.what.startswith("infiniband")] == [pytest.approx(0.0)]
    assert [u.today for u in best] == [pytest.approx(11.0, rel=1e-2)] * len(best)
    assert best[0].saved == pytest.approx(1 - best[0].seconds / best[0].today)


@pytest.mark.parametrize(("predicted", "named"), [(11.0, False), (10.0, True)])
def test_next_to_buy_names_the_replayed_and_the_predicted_step(predicted: float, named: bool) -> None:
    plan = by_hand(10.0, 1.0)
    assert plan.predicted is not None
    other = plan.replace(predicted=plan.predicted.model_copy(update={"step_seconds": predicted}))
    (explained,) = explain(other, cluster=DGX_H100, host=HOST).plans
    assert explained.next_to_buy is not None
    assert "% less than the 11 s of today" in explained.next_to_buy
    assert ("(also replayed; predicted: 10 s)" in explained.next_to_buy) == named


def test_report_for_another_cluster_notes_its_limits() -> None:
    plan = by_hand(10.0, 1.0)
    plan = plan.replace(provenance=plan.provenance.model_copy(update={"cluster": "dgx-a100"}))
    told = "the plan was made for dgx-a100: compute, the optimizer and communication inside of layers"
    other, measured = (
        explain(plan, cluster=replace(DGX_H100, name=name), host=HOST) for name in ("dgx-h100", "dgx-a100")
    )
    assert told in " ".join(str(other).split()) and told not in " ".join(str(measured).split())
    assert any(told in note for note in other.to_dict()["plans"][0]["notes"])


class Planning(EagerPlanner):
    """The default planner with the strategies of these tests."""

    def __init__(self) -> None:
        super().__init__(HOST)


PLANNERS = PluginHost(
    {
        PlannerSpec: {
            "eager": Registered(PlannerSpec(name="eager", target=f"{__name__}:Planning"), "t", "0", "t")
        }
    }
)


def test_why_not(model: Transformer, plans: list[ParallelPlan]) -> None:
    best = plans[0]

    def ask(text: str, **options: Any) -> Any:
        return why_not(best, model, tokens(rows=4), request(**options), parse_pins(text), PLANNERS)

    other = next(d for d in (1, 2, 4) if d != best.degree("tp"))
    slower = ask(f"tp={other}")
    assert slower.verdict == "slower", slower.reason
    assert slower.plan.degree("tp") == other
    assert slower.plan.predicted.step_seconds >= best.predicted.step_seconds
    assert f"tp {other}" in str(slower) and "% more than" in slower.reason
    assert ask(f"tp={best.degree('tp')}").verdict == "chosen"
    illegal = ask("tp=3")
    assert illegal.verdict == "illegal" and "allows 1, 2, 4" in illegal.reason
    assert ask(f"tp={other}", memory_limit=2**10).verdict == "infeasible"
    for text in ("flavour=sweet", "foo=3", "tp=2,foo=3"):
        with pytest.raises(UsageError, match=r"no such option; give a degree \(pp, .* or one of zero, "):
            ask(text)
    with pytest.raises(UsageError, match="NAME=VALUE"):
        parse_pins("tp")


class Resources(HTMLParser):
    """Collects what a page would load, and checks that its tags match."""

    void: ClassVar[set[str]] = {"meta", "link", "img", "br", "rect"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loaded: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loaded += [f"{tag} {k}" for k, _ in attrs if k in ("src", "href", "srcset", "xlink:href")]
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.void:
            assert self.open.pop() == tag


def test_page_loads_no_other_file(plans: list[ParallelPlan]) -> None:
    text = page(plans[0], cluster=DGX_H100, host=HOST)
    parser = Resources()
    parser.feed(text)
    assert parser.open == [] and parser.loaded == []
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert "Where the step goes" in text and "a rank" in text
    hostile = plans[0].replace(provenance={"notes": ["<script>alert(1)</script>"]})
    assert "<script>" not in page(hostile, cluster=DGX_H100, host=HOST)


def test_page_shows_the_requested_memory_limit(model: Transformer) -> None:
    limit = 3 << 30
    (plan,) = eager().plan(model, tokens(rows=4), request(memory_limit=limit))
    assert plan.predicted is not None and plan.predicted.limit_bytes == limit
    assert memory_limit(plan, DGX_H100) == limit
    assert f"of {human_bytes(limit)}" in page(plan, cluster=DGX_H100, host=HOST)
    assert ParallelPlan.from_json(plan.to_json()) == plan
    unknown = plan.replace(predicted=plan.predicted.model_copy(update={"limit_bytes": None}))
    assert memory_limit(unknown, DGX_H100) == DGX_H100.usable_bytes and memory_limit(unknown, None) == 0
