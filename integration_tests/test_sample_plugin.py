"""What somebody else's distribution brings is used like ours: a strategy, a schedule, a cost model."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import Difference, compare_with
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright.cli import main
from meshwright_dtensor.errors import PluginError
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.testing.rank_pool import RankPool

DISTRIBUTION = "meshwright-sample-vocabulary"
TABLES = {
    "llama": {"model.embed_tokens.weight", "lm_head.weight"},
    "gpt2": {"transformer.wte.weight"},
    "bert": {"bert.embeddings.word_embeddings.weight"},
}


def searched_and_applied(rank: int, world_size: int, name: str, degrees: dict[str, int]) -> Difference:
    """Plan without pinning the third party's axis, take the best plan that has `degrees`, apply and compare it."""
    torch.manual_seed(3)
    with mw.deferred_init():
        model = CASES[name].model()
    pins = {axis: degree for axis, degree in degrees.items() if axis != "vp"}
    plans = mw.plan(model, CASES[name].batch(), world_size=world_size, top_k=16, **pins)
    assert isinstance(plans, list)
    chosen = [plan for plan in plans if all(plan.degree(axis) == degree for axis, degree in degrees.items())]
    assert chosen, f"no plan with {degrees} among {[dict(plan.degrees) for plan in plans]}"
    assert chosen[0].strategies["vp"] == "vocabulary-shard"
    return compare_with(model, chosen[0], name)


def test_it_is_listed_with_its_distribution_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["plugins", "--json"])
    assert exit_.value.code == 0
    listed = json.loads(capsys.readouterr().out)
    rows = [row for row in listed["plugins"] if row["distribution"] == DISTRIBUTION]
    assert {row["version"] for row in rows} == {importlib.metadata.version(DISTRIBUTION)}
    assert {row["kind"]: row["name"] for row in rows} == {
        "strategy": "vocabulary-shard",
        "schedule": "one-by-one",
        "cost model": "host-tables",
        "device": "shadow",
    }
    assert listed["problems"] == []


def test_nothing_in_the_packages_knows_of_it() -> None:
    for package in ("meshwright", "meshwright_dtensor", "meshwright_parallel", "meshwright_planner"):
        root = Path(str(__import__(package).__file__)).parent
        for file in root.rglob("*.py"):
            text = file.read_text()
            assert not any(
                name in text for name in ("vocabulary-shard", '"vp"', "one-by-one", "host-tables")
            ), file


def test_it_can_be_turned_off_before_it_is_imported() -> None:
    assert "vocabulary-shard" in discover(disabled=()).strategies()
    assert "vocabulary-shard" not in discover(disabled=[DISTRIBUTION]).strategies()


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "gpt2", "bert"])
def test_it_is_searched_applied_and_right(rank_pool: RankPool, case: str) -> None:
    for difference in rank_pool.run(2, searched_and_applied, case, {"dp": 1, "vp": 2, "tp": 1}):
        assert difference.degrees["vp"] == 2
        assert not difference.unequal
        assert difference.loss <= 1e-6 * difference.single_loss
        assert not difference.wrong()
        assert set(difference.sharded) == TABLES[case]


@pytest.mark.slow
@pytest.mark.parametrize("degrees", [{"dp": 2, "vp": 2, "tp": 1}, {"dp": 1, "vp": 2, "tp": 2}])
def test_it_combines_with_our_strategies(rank_pool: RankPool, degrees: dict[str, int]) -> None:
    for difference in rank_pool.run(4, searched_and_applied, "llama", degrees):
        assert difference.loss <= 1e-6 * difference.single_loss
        assert not difference.wrong()


def trained(rank: int, world_size: int, name: str, plan: ParallelPlan) -> tuple[bool, str]:
    """Three steps of AdamW under `plan`, compared with one device."""
    case = CASES[name]
    report = mw.verify(case.model, case.batch(), plan, steps=3, optimizer=torch.optim.AdamW)  # type: ignore[arg-type]
    return report.ok, report.render()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pins"),
    [
        ("llama", {"dp": 2, "zero": 3}),
        ("llama", {"cp": 2, "dp": 1}),
        ("mixtral", {"ep": 2, "dp": 1}),
    ],
    ids=["zero", "cp", "ep"],
)
def test_it_is_pinned_and_combines_with_what_divides_the_batch(
    rank_pool: RankPool, name: str, pins: dict[str, int]
) -> None:
    torch.manual_seed(0)
    plan = mw.plan(CASES[name].model(), CASES[name].batch(), world_size=4, tp=1, degrees={"vp": 2}, **pins)
    assert isinstance(plan, ParallelPlan)
    used = {axis: degree for axis, degree in plan.degrees.items() if degree > 1}
    assert used == {("zero" if "zero" in pins else next(iter(pins))): 2, "vp": 2}
    for right, text in rank_pool.run(4, trained, name, plan):
        assert right, text


def test_a_plan_that_names_it_survives_the_round_trip() -> None:
    case = CASES["llama"]
    plans = mw.plan(case.model(), case.batch(), world_size=2, top_k=16)
    assert isinstance(plans, list)
    (plan, *_) = [plan for plan in plans if plan.degree("vp") == 2]
    assert ParallelPlan.from_json(plan.to_json()) == plan
    assert "vocabulary-shard" in plan.explain()


def test_its_schedule_is_searched() -> None:
    """Nobody names it: it stands among the plans, costed with its own bubble and memory."""
    case = CASES["llama"]
    plans = mw.plan(
        case.model(), case.batch(), world_size=2, pp=2, microbatches=4, cluster="laptop-cpu", top_k=20
    )
    assert isinstance(plans, list)
    predictions = {plan.pipeline.schedule: plan.predicted for plan in plans if plan.pipeline is not None}
    one_by_one, gpipe = predictions["one-by-one"], predictions["gpipe"]
    assert (
        one_by_one is not None
        and gpipe is not None
        and one_by_one.split is not None
        and gpipe.split is not None
    )
    assert one_by_one.split.bubble_seconds > gpipe.split.bubble_seconds
    assert one_by_one.memory_bytes["activations"] < gpipe.memory_bytes["activations"]
    # its own order decides, not a formula: four microbatches through two stages and back, never two at once (and a few
    # hundredths that the runtime costs the host)
    single = sum(stage.forward_seconds + stage.backward_seconds for stage in one_by_one.split.stages)
    assert one_by_one.compute_seconds + one_by_one.split.bubble_seconds == pytest.approx(4 * single, rel=0.05)


def scheduled(rank: int, world_size: int) -> tuple[bool, int, str]:
    """A pipeline under the third party's schedule: (is it one device, microbatches held at once, schedule of the plan)."""
    from meshwright_parallel import verify
    from meshwright_pipeline import call_of

    case = CASES["gpt2"]
    pins: dict[str, Any] = {"pp": 2, "microbatches": 4, "schedule": "one-by-one"}
    plan = plan_once(case.model(), case.batch(), **pins)
    assert isinstance(plan, ParallelPlan) and plan.pipeline is not None and plan.pipeline.microbatches == 4
    report = verify(case.model, case.batch(), plan, steps=1)
    model = mw.parallelize(case.model(), plan)
    model(**case.batch())
    return report.ok, call_of(model).last.most_alive, plan.pipeline.schedule  # type: ignore[union-attr]


@pytest.mark.slow
def test_its_schedule_is_planned_with_and_runs(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, scheduled) == [(True, 1, "one-by-one")] * 2


def predicted(cost_model: str | None, **pins: Any) -> Prediction:
    case = CASES["gpt2"]
    pins = {"world_size": 2, "cluster": "laptop-cpu"} | pins
    plan = mw.plan(case.model(), case.batch(), cost_model=cost_model, **pins)
    assert isinstance(plan, ParallelPlan) and plan.predicted is not None
    assert plan.provenance.cost_model == cost_model
    return plan.predicted


@pytest.mark.slow
def test_its_cost_model_changes_predictions() -> None:
    """Compute, sums of gradients, messages between stages and the optimizer's step all come from its tables."""
    for pins in ({"dp": 2}, {"tp": 2}, {"pp": 2, "microbatches": 4}):
        usual, one_by_one = predicted(None, **pins), predicted("host-tables", **pins)
        assert usual.split is not None and one_by_one.split is not None
        assert one_by_one.compute_seconds > 1.5 * usual.compute_seconds
        assert one_by_one.split.optimizer_seconds != usual.split.optimizer_seconds
        (axis,) = (axis for axis in one_by_one.split.exposed)
        assert one_by_one.split.exposed[axis] != usual.split.exposed[axis]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [(0.0, "raised ZeroDivisionError"), (-1e9, r"returned -\d"), (float("nan"), "returned nan")],
    ids=["raises", "negative", "nan"],
)
def test_a_broken_cost_model_is_named(monkeypatch: pytest.MonkeyPatch, wrong: float, told: str) -> None:
    monkeypatch.setattr("meshwright_sample_vocabulary.tables.BYTES", wrong)
    monkeypatch.setattr("meshwright_sample_vocabulary.tables.FLOPS", {"float32": wrong})
    with pytest.raises(
        PluginError, match=rf"cost model 'host-tables' of {DISTRIBUTION} {told}.* for Operation\("
    ):
        predicted("host-tables", dp=2)


@pytest.mark.slow
def test_the_command_line_takes_a_cost_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    size = ["--model", "gpt2", "--batch-size", "4", "--sequence-length", "16"]
    where = ["--cluster", "laptop-cpu", "--world-size", "2"]

    def run(*arguments: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as exit_:
            main(list(arguments))
        captured = capsys.readouterr()
        return exit_.value.code, captured.out + captured.err

    code, _ = run("plan", *size, *where, "--cost-model", "host-tables", "-o", str(file))
    plan = ParallelPlan.load(file)
    assert code == 0 and plan.provenance.cost_model == "host-tables" and plan.predicted is not None
    # why not: planned again with the cost model of the plan, unless another is named
    seconds = []
    for more in ([], ["--cost-model", "roofline"]):
        code, text = run("explain", str(file), *size, "--why-not", "tp=2,dp=1", "--json", *more)
        assert code == 0
        seconds.append(json.loads(text)["step_seconds"])
    assert abs(seconds[0] / seconds[1] - 1) > 0.01
    code, text = run("plan", *size, *where, "--cost-model", "measured")
    assert code == 2 and "meshwright calibrate" in text
    code, text = run("plan", *size, *where, "--cost-model", "host-table")
    assert code != 0 and "did you mean 'host-tables'" in text


def test_the_picture_says_what_its_timeline_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.axes import Axes

    from meshwright.pictures import draw_plan
    from meshwright_planner.clusters.registry import LAPTOP_CPU

    captured: list[str] = []
    write = Axes.set_xlabel

    def noted(self: Axes, text: str, **options: Any) -> Any:
        captured.append(text)
        return write(self, text, **options)

    monkeypatch.setattr(Axes, "set_xlabel", noted)
    case = CASES["gpt2"]
    plan = mw.plan(
        case.model(), case.batch(), world_size=2, dp=2, cluster="laptop-cpu", cost_model="host-tables"
    )
    assert isinstance(plan, ParallelPlan)
    draw_plan(plan, LAPTOP_CPU.running(2), discover(), tmp_path / "plan.png")
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert any("note: predicted by the cost model 'host-tables'" in text for text in captured)
