"""Predicted memory against counted bytes of tensors, on one rank; for several see benchmarks/planner_memory.py."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import planner_models
import pytest
import torch
import torch.nn.functional as F
from counting import Counting
from counting import counted as of_a_step
from planner_models import LAPTOP_CPU, DataLike, Transformer, eager, host_of, tokens
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.rules.composites.cross_entropy_rows import RowsLoss
from meshwright_dtensor.strategy import (
    GradientKind,
    Link,
    ParameterSize,
    PlanRequest,
    SearchRequest,
    StrategyCost,
)
from meshwright_planner import EagerPlanner
from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.evaluation.placed_model import summed_units
from meshwright_planner.memory.peak import Moment, Replay, at_peak, moments
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.effect import recomputed
from meshwright_planner.recompute.rules import recompute_rules
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record


def counted(model: nn.Module, batch: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> int:
    """Most bytes at once in the second step, with the loss as ranks compute it."""
    of_torch = F.cross_entropy

    def loss(logits: torch.Tensor, target: torch.Tensor, **options: Any) -> Any:
        return of_torch(logits, target, **options) if options else RowsLoss.apply(logits, target, -100)

    patch.setattr(F, "cross_entropy", loss)
    return of_a_step(model, batch)


@pytest.mark.parametrize(("layers", "rows"), [(4, 8), (2, 1)])
def test_peak_of_one_rank_equals_prediction(layers: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are most of it, and where the optimizer's step is."""
    model, batch = Transformer(layers=layers), tokens(rows=rows)
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch, monkeypatch), rel=0.05)


def test_live_bytes_follow_tensor_lifetimes() -> None:
    held = torch.zeros(1000)
    with Counting([held]) as counting:
        assert counting.alive == 4000
        more = held + 1
        view = more.view(10, 100)
        assert counting.alive == 8000
        del more
        assert counting.alive == 8000 and view.shape == (10, 100)
        del view
        assert counting.alive == 4000 and counting.peak == 8000


def test_peak_is_the_largest_moment() -> None:
    memory = {"parameters": 10, "gradients": 10, "optimizer": 20, "activations": 100, "temporaries": 0}
    when = (Moment(1.0, 0.0, 5.0), Moment(0.5, 0.5, 8.0), Moment(0.0, 1.0, 20.0))
    assert at_peak(memory, when) == {**memory, "gradients": 0, "temporaries": 5}
    small = {**memory, "activations": 4}
    assert at_peak(small, when) == {**small, "activations": 0, "temporaries": 20}
    bucketed = at_peak({**memory, "gradients": 200}, when, bucket=80.0)
    assert (bucketed["gradients"], bucketed["activations"]) == (180, 50)
    assert at_peak({**memory, "gradients": 60}, (when[0], when[1]), bucket=100.0)["gradients"] == 60
    lasting = at_peak({**memory, "gradients": 60}, when[:1], bucket=20.0, always=40.0)
    assert (lasting["gradients"], lasting["activations"]) == (40, 100)
    assert at_peak({**memory, "gradients": 60}, when[1:2], bucket=5.0, always=40.0)["gradients"] == 55
    twice = (Moment(1.0, 0.0, 5.0, 7.0),)
    result = [
        at_peak(memory, twice, b, copies=c)["temporaries"]
        for b, c in ((0.0, True), (1.0, True), (1.0, False))
    ]
    assert result == [5, 12, 5]


def kept_item_by_item(problem: PlacementProblem, placement: Placement) -> tuple[float, list[float]]:
    """Bytes that autograd keeps, and those of each representative node, as they are defined."""
    tape, quotient, costs = problem.tape, problem.quotient, problem.costs
    lasting = [(value.name or "").startswith(("param:", "buffer:")) for value in tape.values]
    kept: dict[object, float] = {}
    first: dict[object, tuple[int, float]] = {}
    for number, item in enumerate(tape.saved):
        k = quotient.node(item.node)
        option = placement.options[k]
        part = costs.part(costs.split((*option.ins, *option.outs)))
        if item.root is None or not lasting[item.root]:
            first.setdefault(
                ("inner", number) if item.root is None else item.root, (k, part * problem.saved.nbytes(item))
            )
        if item.root is None:
            kept["inner", number] = problem.saved.nbytes(item) * part
            continue
        split = problem.saved.split(item, option)
        stored = placement.stored.get(quotient.value(item.root), "I")
        if lasting[item.root] and costs.split((stored,)) == split:
            continue
        kept[item.root, split] = max(kept.get((item.root, split), 0.0), item.nbytes * costs.part(split))
    per_node = dict.fromkeys(quotient.nodes, 0.0)
    for k, size in first.values():
        per_node[k] += size
    return sum(kept.values()), list(per_node.values())


@pytest.mark.parametrize("policy", [None, "full", "selective"])
def test_saved_bytes_equal_the_sum_of_saved_tensors(policy: str | None) -> None:
    model, book, dice = Transformer(layers=4), RuleBook.first_party(), random.Random(policy)
    tape = record(model, Batch.of(tokens()), book.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, 2), 2)
    problem = PlacementProblem(Legality(tape, quotient(tape), book, costs))
    placement = problem.replicated()
    for _ in range(3):
        options = {k: dice.choice(per_node) for k, per_node in problem.options.items()}
        some = replace(placement, options=options)
        left, result, _ = (
            recomputed(problem, some, recompute_rules(model, policy)) if policy else (problem, some, {})
        )
        whole, per_node = kept_item_by_item(left, result)
        assert left.saved.total(result) == pytest.approx(whole, rel=1e-12)
        assert Replay(left, result).kept == pytest.approx(per_node, rel=1e-12)


def test_dominated_moments_only_are_dropped() -> None:
    dice = random.Random(0)
    for _ in range(20):
        candidates = [Moment(*(dice.randint(0, 5) for _ in range(4))) for _ in range(60)]
        result = moments(SimpleNamespace(moments=lambda candidates=candidates: candidates[1:]), candidates[0])  # type: ignore[arg-type]
        some = candidates[1:]
        best = {
            moment
            for moment in some
            if not any(other.dominates(moment) and other != moment for other in some)
        }
        assert set(result[:-1]) == best and len(result[:-1]) == len(best)
        assert (
            result[-1] is candidates[0]
        )  # which gradients are there when the optimizer steps is another question


def test_sharded_gradients_are_shards_in_the_optimizer_step() -> None:
    parts = {"parameters": 5, "gradients": 100, "optimizer": 20, "activations": 10, "temporaries": 0}
    stepping = Moment(0.0, 1.0, 0.0, stepping=True, copies=1.0)
    # a bucket of a whole unit counts during the backward pass, and is freed before the optimizer step
    assert at_peak(parts, (Moment(0.0, 1.0, 0.0), stepping), stepped=25.0)["gradients"] == 100
    alone, whole = at_peak(parts, (stepping,), stepped=25.0), at_peak(parts, (stepping,))
    assert (alone["gradients"], alone["temporaries"]) == (25, 25)
    assert (whole["gradients"], whole["temporaries"]) == (100, 100)  # copies are no gradients
    one_by_one = replace(stepping, transient_bytes=70.0, copies=0.0)
    assert at_peak(parts, (one_by_one,), stepped=25.0)["temporaries"] == 70


def test_permanent_gradients_count_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where activations are most, what the strategy says that stays is there too; and a bucket of the others."""
    model, batch = Transformer(layers=4), tokens(8)
    sizes = [p.numel() * 4 for p in model.parameters()]
    seen: list[SearchRequest] = []

    def gradients(staying: float, bucket: int = 2**10) -> int:
        class Summed(DataLike):
            gradient: ClassVar[GradientKind] = "deferred"

            def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
                seen.append(request)
                return replace(
                    super().cost(request, degree, link), persistent_gradients=staying, bucket_bytes=bucket
                )

        Summed.__qualname__, Summed.__module__ = "Summed", planner_models.__name__
        monkeypatch.setattr(planner_models, "Summed", Summed, raising=False)
        result = EagerPlanner(host_of(Summed)).plan(
            model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=2, dp=2)
        )
        assert result[0].predicted is not None
        assert result[0].predicted.memory_bytes["activations"] > 0
        return result[0].predicted.memory_bytes["gradients"]

    none, part, candidates = map(gradients, (0.0, 0.5, 1.0))
    assert none < sum(sizes) / 2 <= part < candidates == sum(sizes)
    assert gradients(0.0, 2**20) > 2**20 / 2
    # what the strategy may tell it from
    assert {
        sum(p.numel * p.itemsize[0] for unit in request.sizes.units for p in unit) for request in seen
    } == {sum(sizes)}


def test_parameters_of_an_axis_are_divided_before_the_sum() -> None:
    """What is cut is smaller; of whole ones a rank has a part; what is only summed over the axis is not summed at all."""
    size = ParameterSize((8, 6), (), (4, 4), True)
    cut, both = (
        replace(size, shape=(2, 6), sharded_dims=(0,)),
        replace(size, shape=(2, 3), sharded_dims=(0, 1)),
    )
    owned = [*(f"own.{n}" for n in range(8)), "cut", "both"]
    unit = dict.fromkeys(["free", *owned], size)
    stated = {"cut": {"ep": "S(0)"}, "both": {"ep": "S(0)", "tp": "S(1)"}}

    def units_of(*over: str) -> list[tuple[ParameterSize, ...]]:
        return list(
            summed_units([unit, unit], {"ep": frozenset(owned)}, stated, {"dp": 2, "ep": 4, "tp": 2}, over)
        )

    first, second = units_of("dp", "ep")
    assert first is second and Counter(first) == {size: 1 + 2, cut: 1, both: 1}
    assert units_of("ep") == [(size,)] * 2


def test_parameters_in_compute_dtype_have_no_copies() -> None:
    """Those of another one do, each in the dtype that is computed in."""

    def parameters(model: nn.Module, precision: str | None) -> int:
        request = PlanRequest(cluster=LAPTOP_CPU, world_size=1, precision=precision)
        result = eager().plan(model, tokens(), request)[0].predicted
        assert result is not None
        return result.memory_bytes["parameters"]

    wide, narrow = Transformer(), Transformer().to(torch.bfloat16)
    per_node = sum(p.numel() for p in wide.parameters())
    assert parameters(wide, None) == 4 * per_node and parameters(wide, "bf16") == 6 * per_node
    assert parameters(narrow, None) == parameters(narrow, "bf16") == 2 * per_node
    narrow.norm.float()
    assert parameters(narrow, "bf16") == 2 * per_node + (2 + 2) * 2 * 64


def test_saved_buffers_count_once() -> None:
    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(32, 512)
            self.register_buffer("basis", torch.randn(512, 512))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.up(x) @ self.basis).relu().mean()  # type: ignore[operator]

    model, batch = Projected(), {"x": torch.randn(64, 32)}
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    memory = plan.predicted.memory_bytes
    assert memory["buffers"] == 512 * 512 * 4 > memory["activations"]
    assert plan.predicted.total_bytes == pytest.approx(of_a_step(model, batch), rel=0.05)
