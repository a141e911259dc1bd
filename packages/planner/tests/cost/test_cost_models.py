"""Cost models by hook: ours are the cluster's own figures, somebody else's are asked, and answers that are no times are refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from planner_models import DGX_H100, HOST, LAPTOP_CPU, Transformer, tokens

from meshwright_dtensor.cluster import Cluster, Communication, MeasuredCollective, MeasuredWork, Operation
from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import CostModelSpec, PluginHost, StrategySpec
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner import EagerPlanner
from meshwright_planner.cost.cost_models import Roofline
from meshwright_planner.plugin import meshwright_cost_models
from meshwright_planner.reports.page import page
from meshwright_planner.simulation.replay import simulate

CURVE = ((1e3, 1e-5), (1e7, 1e-2))
CALIBRATED = replace(
    LAPTOP_CPU,
    name="mine",
    work=(
        MeasuredWork("matmul", "float32", CURVE, CURVE),
        MeasuredWork("update", "float32", ((100.0, 1e-4), (1e6, 1e-2)), ()),
    ),
    collectives=(MeasuredCollective("all_reduce", 2, ((1e3, 1e-4), (1e6, 1e-2)), 2),),
)


class Constant:
    """Every operation takes the same time; `questions` keeps the arguments."""

    operation_says: ClassVar[Callable[[Operation], Any]] = lambda op: 1e-3
    collective_says: ClassVar[Callable[[Communication], Any]] = lambda c: 1e-2
    questions: ClassVar[list[Operation | Communication]] = []

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def operation(self, operation: Operation) -> Any:
        type(self).questions.append(operation)
        return type(self).operation_says(operation)

    def collective(self, communication: Communication) -> Any:
        type(self).questions.append(communication)
        return type(self).collective_says(communication)


def target_of(kind: object) -> str:
    return f"{__name__}:{kind.__qualname__}"  # type: ignore[attr-defined]


def host_with(*records: CostModelSpec) -> PluginHost:
    default = {
        r.name: Registered(r, "acme-costs", "1.0", "acme") for r in (*meshwright_cost_models(), *records)
    }
    return PluginHost({StrategySpec: HOST.strategies(), CostModelSpec: default})


def planned(
    cost_model: str | None, cluster: Cluster = LAPTOP_CPU, host: PluginHost | None = None, **pins: Any
) -> ParallelPlan:
    default = host or host_with(CostModelSpec(name="constant", target=target_of(Constant)))
    request = PlanRequest(cluster=cluster, world_size=2, cost_model=cost_model, **pins)
    return EagerPlanner(default).plan(Transformer(layers=2), tokens(rows=4), request)[0]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Constant, "questions", [])


def same_prediction(first: ParallelPlan, other: ParallelPlan) -> bool:
    return first.predicted == other.predicted and first.degrees == other.degrees


@pytest.mark.parametrize("pins", [{"dp": 2}, {"tp": 2}, {}], ids=["dp", "tp", "searched"])
def test_first_party_models_use_the_figures_of_the_cluster(pins: dict[str, int]) -> None:
    default, measured = planned(None, CALIBRATED, **pins), planned("measured", CALIBRATED, **pins)
    assert same_prediction(default, measured)
    assert default.provenance.cost_model is None and measured.provenance.cost_model == "measured"
    datasheet = planned("roofline", CALIBRATED, **pins)
    assert same_prediction(datasheet, planned(None, replace(CALIBRATED, work=(), collectives=()), **pins))
    assert not same_prediction(datasheet, default)


@pytest.mark.parametrize(
    ("cluster", "missing"),
    [
        (DGX_H100, "no operations and no collectives of cluster 'dgx-h100'"),
        (replace(CALIBRATED, collectives=()), "no collectives of cluster 'mine'"),
    ],
)
def test_measured_model_needs_a_calibrated_cluster(cluster: Cluster, missing: str) -> None:
    with pytest.raises(UsageError, match=missing + r".*meshwright calibrate"):
        planned("measured", cluster)


def test_all_times_come_from_the_cost_model() -> None:
    data, tensor = planned("constant", dp=2), planned("constant", tp=2)
    assert data.predicted is not None and data.predicted.split is not None
    operations = data.predicted.compute_seconds / 1e-3
    assert operations == pytest.approx(round(operations)) and operations > 20
    assert data.predicted.split.optimizer_seconds == pytest.approx(1e-3)
    # the stand-in for data parallelism hides all but a tenth
    assert data.predicted.communication_seconds == pytest.approx(0.1 * 1e-2)
    assert tensor.predicted is not None
    sums = tensor.predicted.communication_seconds / 1e-2
    assert sums == pytest.approx(sum(c.count for c in tensor.collectives if c.axis == "tp")) and sums > 1


def test_cost_model_gets_local_sizes() -> None:
    planned("constant", DGX_H100, tp=2)
    operations = [question for question in Constant.questions if isinstance(question, Operation)]
    assert len(operations) == len(set(operations))
    linear = [
        question for question in operations if question.name == "linear" and question.inputs[0] == (4, 32, 64)
    ]
    assert {question.inputs[1] for question in linear} >= {(64, 64), (32, 64), (256, 64), (128, 64)}
    shard = next(question for question in linear if question.inputs[1] == (128, 64))
    assert (
        shard.kind == "matmul"
        and shard.dtype == "float32"
        and shard.backward
        and shard.outputs == ((4, 32, 128),)
    )
    assert shard.flops == 2 * 4 * 32 * 64 * 128 and shard.made == (4.0 * 4 * 32 * 128,)
    (update,) = {question.name for question in operations if question.kind == "update"}
    assert update == "adamw"
    moved = {
        (question.axis, question.levels)
        for question in Constant.questions
        if isinstance(question, Communication)
    }
    assert moved == {("tp", ("nvlink",))}
    Constant.questions.clear()
    request = PlanRequest(cluster=DGX_H100, world_size=16, cost_model="constant", dp=16)
    host = host_with(CostModelSpec(name="constant", target=target_of(Constant)))
    EagerPlanner(host).plan(Transformer(layers=2), tokens(rows=16), request)
    (sums,) = (question for question in Constant.questions if isinstance(question, Communication))
    assert (sums.kind, sums.axis, sums.degree) == ("all_reduce", "dp", 16)
    assert sums.levels == ("nvlink", "infiniband")


def raising(question: object) -> float:
    raise KeyError("no such table")


WRONG: list[tuple[Callable[[Any], Any], str]] = [
    (raising, r"raised KeyError: 'no such table'"),
    (lambda q: -1.0, r"returned -1\.0"),
    (lambda q: math.nan, r"returned nan"),
    (lambda q: math.inf, r"returned inf"),
    (lambda q: (1e-3, 2e-3), r"returned \(0\.001, 0\.002\), a tuple"),
    (lambda q: "fast", r"returned 'fast', a str"),
    (lambda q: None, r"returned None, a NoneType"),
]


@pytest.mark.parametrize("which", ["operation", "collective"])
@pytest.mark.parametrize(
    ("says", "told"), WRONG, ids=["raises", "negative", "nan", "inf", "pair", "text", "none"]
)
def test_answer_that_is_no_time_is_rejected(
    monkeypatch: pytest.MonkeyPatch, which: str, says: Callable[[Any], Any], told: str
) -> None:
    monkeypatch.setattr(Constant, f"{which}_says", staticmethod(says))
    kind = "Operation" if which == "operation" else "Communication"
    with pytest.raises(
        PluginError, match=rf"cost model 'constant' of acme-costs {told}.* for {kind}\(.*kind="
    ):
        planned("constant", tp=2)


class Half:
    def __init__(self, cluster: Cluster) -> None: ...

    def operation(self, operation: Operation) -> float:
        return 0.0


def fails(cluster: Cluster) -> None:
    raise RuntimeError("no table for it")


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("half", r"'half' of acme-costs makes a Half without collective; its target must take a Cluster"),
        (
            "fails",
            r"'fails' of acme-costs cannot be made for cluster 'laptop-cpu': RuntimeError: no table for it",
        ),
        ("rooflin", r"there is no cost model named 'rooflin'; did you mean 'roofline'\?"),
    ],
)
def test_unusable_cost_model_is_rejected(name: str, told: str) -> None:
    records = [CostModelSpec(name=n, target=target_of(t)) for n, t in (("half", Half), ("fails", fails))]
    with pytest.raises(PluginError, match=told):
        planned(name, host=host_with(*records))
    with pytest.raises(UsageError, match="cost_model='' is no name"):
        planned("")


def test_simulation_notes_an_unknown_cost_model() -> None:
    plan = planned("constant", dp=2)
    assert "cost model constant" in plan.explain()
    notes = simulate(plan, LAPTOP_CPU.running(2), host=HOST).notes
    assert any("cost model 'constant'" in note for note in notes)
    assert not simulate(planned(None, dp=2), LAPTOP_CPU.running(2), host=HOST).notes
    shown = page(plan, cluster=LAPTOP_CPU.running(2), host=HOST)
    assert "Note: predicted by the cost model" in shown
    assert "Note: " not in page(planned(None, dp=2), cluster=LAPTOP_CPU.running(2), host=HOST)
    assert ParallelPlan.from_json(plan.to_json()) == plan


class Quick(Roofline):
    """A subclass of ours that says other times than the figures that it inherits."""

    def operation(self, operation: Operation) -> float:
        return super().operation(operation) / 1000


def test_subclass_of_a_first_party_model_has_no_bound() -> None:
    host = host_with(CostModelSpec(name="quick", target=target_of(Quick)))
    predicted = planned("quick", host=host).predicted
    assert predicted is not None and predicted.gap is None
    assert predicted.proof == "not proven: there is no lower bound for the cost model 'quick'"
