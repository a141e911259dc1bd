"""The gap of a plan is proven: no configuration, evaluated one by one, is faster than it allows."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from planner_models import (
    DGX_H100,
    HOST,
    LAPTOP_CPU,
    DataLike,
    Mlp,
    TensorLike,
    Transformer,
    eager,
    host_of,
    tokens,
)
from torch import nn

from meshwright_dtensor.cluster import Cluster, Communication, MeasuredWork, Operation
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import CostModelSpec, PluginHost, StrategySpec
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.strategy import Link, PlanRequest, SearchRequest, Strategy, StrategyCost
from meshwright_planner import EagerPlanner, explain
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.ilp import GAP
from meshwright_planner.planners.eager import default_rules
from meshwright_planner.planners.mcmc import McmcPlanner
from meshwright_planner.reports.page import page
from meshwright_planner.search.optimality import floor_of, prove, settle


def search_of(model: nn.Module, batch: object, request: PlanRequest, host: PluginHost = HOST) -> Search:
    return Search(EagerPlanner(host).setting(model, batch, request, host), default_rules())


def every(search: Search) -> Iterator[Candidate]:
    """All configurations, each evaluated exactly."""
    for degrees in search.combinations():
        for way in search.ways(degrees) or [{}]:
            for policy in (None, *search.can_recompute(degrees)):
                yield search.evaluate(Point.of(degrees, 0, way, policy))


def drawn(dice: random.Random) -> Cluster:
    """A cluster by lot: bound by links, by launches, by operations; now and then one that was measured, and unevenly so."""
    cluster = replace(
        dice.choice([LAPTOP_CPU, DGX_H100]),
        launch_s=dice.choice([0.0, 1e-6, 1e-4]),
        flops={"float32": 10 ** dice.uniform(8, 13)},
        memory_bandwidth=10 ** dice.uniform(8, 12),
        hides_launch=dice.random() < 0.5,
    )
    links = tuple(replace(level, bandwidth_Bps=10 ** dice.uniform(7, 12)) for level in cluster.links)
    sizes = (1e3, 1e5, 1e7, 1e9)
    work = tuple(
        MeasuredWork(
            kind, "float32", *(tuple((n, n * 10 ** dice.uniform(-10, -8)) for n in sizes) for _ in range(2))
        )
        for kind in dice.sample(["matmul", "norm", "pointwise", "view", "update", "attention-16", "thin"], 4)
    )
    return replace(cluster, links=links, work=work if dice.random() < 0.5 else ())


MODELS = [
    lambda: (Transformer(layers=3), tokens(rows=8)),
    lambda: (nn.Sequential(*(Mlp(64, 128) for _ in range(3))), torch.randn(8, 64)),
    lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(512, 64)),
        torch.randn(8, 3, 8, 8),
    ),
]


@pytest.mark.parametrize("seed", range(12))
def test_gap_bounds_every_configuration(seed: int) -> None:
    dice = random.Random(seed)
    cluster, ranks = drawn(dice), dice.choice([1, 2, 4])
    model, batch = MODELS[seed % len(MODELS)]()
    candidates = list(every(search_of(model, batch, PlanRequest(cluster=cluster, world_size=ranks))))
    sizes = sorted(c.total_bytes for c in candidates)
    limit = dice.choice([None, int(1.05 * sizes[len(sizes) // 2])])
    request = PlanRequest(cluster=cluster, world_size=ranks, memory_limit=limit, top_k=3)
    search = search_of(model, batch, request)
    plans = eager().plan(model, batch, request)
    fitting = sorted(c.step_seconds for c in every(search) if not c.excess_bytes)
    for place, plan in enumerate(plans):
        assert plan.predicted is not None and plan.predicted.gap is not None and plan.predicted.proof
        least = plan.predicted.step_seconds * (1 - plan.predicted.gap)
        # what is faster than it may be stands before it in the list
        assert sum(s < least * (1 - GAP) for s in fitting) <= place
    floor = floor_of(search, search.setting.cluster, candidates).seconds(1)
    assert all(floor <= c.step_seconds * (1 + 1e-9) for c in candidates)
    # small products fill few tiles, which the bound does not know
    assert floor > 0.005 * candidates[0].step_seconds


def test_proof_is_exact_on_one_rank_and_bounded_on_several() -> None:
    batch = tokens(rows=8)
    (single,) = eager().plan(Transformer(), batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))
    assert single.predicted is not None
    assert single.predicted.gap == 0.0 and single.predicted.proof is not None
    assert single.predicted.proof.startswith("exact: no other configuration")
    data = EagerPlanner(host_of(DataLike)).plan(
        Transformer(), batch, PlanRequest(cluster=LAPTOP_CPU, world_size=4)
    )
    assert data[0].predicted is not None and data[0].predicted.gap == 0.0
    (four,) = eager().plan(Transformer(), batch, PlanRequest(cluster=LAPTOP_CPU, world_size=4))
    assert four.predicted is not None and four.predicted.gap is not None and 0 < four.predicted.gap < 0.5
    assert four.predicted.proof is not None and four.predicted.proof.startswith("bounded: 3 configurations")


class Other(DataLike):
    name, axis, order = "other", "op", 20


class Third(DataLike):
    name, axis, order = "third", "rp", 25


def test_gap_bounds_a_search_by_hill_climbing() -> None:
    """There are more combinations than are tried; those that were not tried cannot go below the bound either."""
    host = host_of(DataLike, TensorLike, Other, Third)
    request = PlanRequest(cluster=DGX_H100, world_size=128)
    (plan,) = EagerPlanner(host).plan(Transformer(layers=2), tokens(rows=128), request)
    assert plan.predicted is not None and plan.predicted.gap is not None and 0 < plan.predicted.gap < 1
    assert any("climbing" in note for note in plan.provenance.notes)


class Summed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


class Along(Strategy):
    """Shares the sequence."""

    name, axis, order = "along", "cp", 20

    def degrees(self, request: SearchRequest) -> list[int]:
        return [d for d in range(1, request.world_size + 1) if request.world_size % d == 0]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        return StrategyCost()


FIGURES = replace(
    DGX_H100,
    chip=None,
    links=tuple(replace(level, protocols=()) for level in DGX_H100.links),
    memory_efficiency=0.8,
)
"""A device that knows no shapes, so that a tiny model is faster the more ranks divide it."""


@pytest.mark.parametrize(
    ("host", "ranks", "reason"),
    [
        (HOST, 16, "not tried by default: tp above 8, wider than nvlink: the best"),
        (
            host_of(DataLike, Along, TensorLike),
            64,
            "not tried by default: cp above 1, for rows of fewer than 16,384 tokens, tp above 8, wider than nvlink: the best",
        ),
    ],
)
def test_note_names_degrees_that_are_not_tried(host: PluginHost, ranks: int, reason: str) -> None:
    """There is no hill climbing: the few default combinations were all tried."""
    request = PlanRequest(cluster=FIGURES, world_size=ranks)
    (plan,) = EagerPlanner(host).plan(Transformer(layers=2), tokens(rows=64, length=4096), request)
    (note,) = [note for note in plan.provenance.notes if "combinations of degrees" in note]
    assert reason in note and "climbing" not in note
    (pinned,) = EagerPlanner(host).plan(
        Transformer(layers=2), tokens(rows=64, length=4096), replace(request, tp=8, dp=ranks // 8)
    )
    assert "not tried by default" not in " ".join(pinned.provenance.notes)


def test_widest_tensor_axis_is_tried_for_a_tiny_model() -> None:
    """An axis wider than the innermost links is still fastest, because nothing is communicated. It is tried where it may be."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(6)), nn.Flatten(0), Summed())
    request = PlanRequest(cluster=FIGURES, world_size=512)
    small, large = (
        EagerPlanner(HOST).plan(model, torch.empty(64, length, 256, device="meta"), request)[0]
        for length in (4, 65536)
    )
    assert small.degree("tp") == 512 and not small.collectives and large.degree("tp") == 8
    notes = [note for plan in (small, large) for note in plan.provenance.notes if "tp above 8" in note]
    assert "tp above 8 except " in notes[0] and "512, wider than" in notes[0] and "except" not in notes[1]


def test_unsolved_placement_widens_the_gap() -> None:
    search = search_of(Transformer(layers=2), tokens(), PlanRequest(cluster=LAPTOP_CPU, world_size=2, tp=2))
    (degrees,) = search.combinations()
    exact = search.evaluate(search.point(degrees))
    assert exact.placement.bound is None
    early = replace(exact.placement, bound=0.75 * exact.placement.objective, status="time limit")
    proof = prove(search, [replace(exact, placement=early)], [degrees])
    assert "1 placement programs were not solved to optimality" in proof.words
    assert proof.least is not None and proof.least <= 0.75 * exact.step_seconds


class Tables:
    def __init__(self, cluster: Cluster) -> None: ...

    def operation(self, operation: Operation) -> float:
        return 1e-3

    def collective(self, communication: Communication) -> float:
        return 1e-3


def test_no_gap_with_a_third_party_cost_model() -> None:
    spec = CostModelSpec(name="tables", target=f"{__name__}:Tables")
    host = PluginHost(
        {StrategySpec: HOST.strategies(), CostModelSpec: {"tables": Registered(spec, "acme", "1", "acme")}}
    )
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=2, cost_model="tables")
    (plan,) = EagerPlanner(host).plan(Transformer(), tokens(), request)
    assert plan.predicted is not None and plan.predicted.gap is None
    assert plan.predicted.proof == "not proven: there is no lower bound for the cost model 'tables'"
    assert "gap: unknown; not proven" in str(explain(plan))
    single = EagerPlanner(host).plan(Transformer(), tokens(), replace(request, world_size=1))[0].predicted
    assert single is not None and single.gap == 0.0  # everything was costed


def test_other_planners_have_the_same_bound() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4)
    (ours,) = eager().plan(Transformer(layers=2), tokens(rows=4), request)
    (theirs,) = McmcPlanner(HOST, proposals=20).plan(Transformer(layers=2), tokens(rows=4), request)
    for plan in (ours, theirs):
        assert plan.predicted is not None and plan.predicted.gap is not None
    assert ours.predicted is not None and theirs.predicted is not None
    assert (theirs.predicted.gap or 0.0) >= (ours.predicted.gap or 0.0)


def test_reports_show_gap_and_proof() -> None:
    plans = eager().plan(
        Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, world_size=2, top_k=2)
    )
    best = plans[0].predicted
    assert best is not None and best.gap is not None and best.proof is not None
    shown = f"{100 * best.gap:.1f}%"
    report = explain(plans)
    assert (
        report.to_dict()["plans"][0]["gap"] == best.gap
        and report.to_dict()["plans"][0]["proof"] == best.proof
    )
    text = " ".join(str(report).split())
    assert "activations gap bound by" in text and f"may be up to {shown} faster; bounded:" in text
    assert (
        shown in plans[0].explain()
        and shown in page(plans[0])
        and "bounded: 2 configurations" in page(plans[0])
    )
    again = ParallelPlan.from_json(plans[0].to_json())
    assert again.predicted == best
    for wrong in (-0.1, 1.5, float("nan")):
        with pytest.raises(PlanError, match="gap"):
            Prediction(step_seconds=1.0, gap=wrong)
    old = Prediction(step_seconds=1.0)
    assert old.gap is None and old.proof is None  # plans of before say nothing of it
    with pytest.raises(UsageError, match="top_k"):
        eager().plan(Transformer(), tokens(), PlanRequest(cluster=LAPTOP_CPU, top_k=0))


BUSY = replace(LAPTOP_CPU, flops={"float32": 1e6}, cores=0)
"""A cluster on which only products count."""


class Constant(nn.Module):
    """A product of as many rows as a rank has tokens at one row a microbatch, whatever the batch; and one of the batch."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.wide, self.narrow = nn.Linear(256, 256), nn.Linear(256, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean() * x.new_ones(self.rows, 256)
        return (self.narrow(x) * self.wide(scale).mean()).sum()


@pytest.mark.parametrize("rows", [2, 4])
def test_bound_counts_products_of_constants_once(rows: int) -> None:
    """Products as long as the rows of a rank are no part of the batch for that."""
    request = PlanRequest(cluster=BUSY, world_size=8 // rows, dp=8 // rows)
    search = search_of(Constant(rows), torch.randn(8, 256), request, host_of(DataLike))
    candidate = next(every(search))
    assert candidate.problem.tape.rows == rows
    least = floor_of(search, search.setting.cluster, [candidate]).seconds(1)
    wide = 6 * rows * 256 * 256 / search.setting.cluster.rate("float32")
    assert 0.5 * wide / (8 // rows) < least < 0.75 * wide  # counted for the batch it would be `wide`


class Unlike(Transformer):
    """Of several rows it takes an operation more than of one."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        loss = super().forward(ids, labels)
        return loss if ids.shape[0] == 1 else loss.tanh()


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Transformer, Unlike])
def test_bound_counts_products_of_rows_for_the_whole_batch(kind: type[Transformer]) -> None:
    """The bound is the same for any number of rows of the tape."""
    model, batch = kind(layers=2), tokens(rows=8)
    bounds = []
    for ranks in (1, 2, 4, 8):
        search = search_of(model, batch, PlanRequest(cluster=BUSY, world_size=ranks), host_of(DataLike))
        candidate = next(every(search))
        bounds.append(ranks * floor_of(search, search.setting.cluster, [candidate]).seconds(1))
    assert bounds == pytest.approx([bounds[0]] * 4, rel=0.01)


def test_faster_configuration_of_the_proof_is_returned() -> None:
    """Of two ways to save memory the search was only told the slower one."""
    search = search_of(
        Transformer(layers=2),
        tokens(rows=8),
        PlanRequest(cluster=LAPTOP_CPU, world_size=2),
        host_of(DataLike),
    )
    (degrees,) = search.combinations()
    points = [Point.of(degrees, 0, {}, policy) for policy in (None, "full")]
    slow = search.evaluate(points[1])
    ranked, proof = settle(search, [slow], [degrees], {points[1]: slow})
    assert [ranked[0].point, ranked[-1].point] == points and ranked[0].step_seconds < slow.step_seconds
    assert proof.words.startswith("exact") and proof.gap(ranked[0].step_seconds) == 0.0
    search.end = 0.0  # the time is over: nothing more is costed, and nothing is claimed of it
    ranked, proof = settle(search, [slow], [degrees], {points[1]: slow})
    assert [c.point for c in ranked] == points[1:]
    assert proof.words.startswith("bounded") and proof.gap(slow.step_seconds) > 0.0


class Careful(DataLike):
    """Refuses to keep everything, but only when it is asked exactly."""

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        if not request.pipeline.estimate and not request.step.recompute:
            raise PlanError("degrees.dp", degree, "less must be kept", "1")
        return super().cost(request, degree, link)


def test_faster_configuration_of_the_proof_may_be_refused() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=2)
    search = search_of(Transformer(layers=2), tokens(rows=8), request, host_of(Careful))
    (degrees,) = search.combinations()
    point = Point.of(degrees, 0, {}, "full")
    slow = search.evaluate(point)
    ranked, _ = settle(search, [slow], [degrees], {point: slow})
    assert ranked[-1] is slow and all(c.point.recompute for c in ranked)
