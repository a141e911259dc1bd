"""Losses that are not additive: forecast and cost at planning time, and the warning of the first step."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loss_models import ADDING, WHOLE, judged, judged_batch, judged_plan, mean, total
from pipe_models import TOKENS, Chain, chain_batch
from torch import Tensor, nn

from meshwright_dtensor.plan import Prediction
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import ForwardsFirst
from meshwright_dtensor.strategy import Link, ModuleWork, PipelineQuery, SearchRequest, StrategyCost
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import Shape, pipeline, timetable
from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.planning.activation_memory import MemoryPeak
from meshwright_pipeline.planning.full_batch_loss import with_tail
from meshwright_pipeline.planning.simulate import Prediction as Steps
from meshwright_pipeline.planning.unit_costs import NO_WORK
from meshwright_pipeline.strategy import Pipeline
from meshwright_pipeline.timeline import planned
from meshwright_pipeline.trace.side_outputs import CannotBeCut

LINK = Link("test", 1e-6, 1e9)
NAMES = ["gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"]


def why(model: nn.Module, batch: dict[str, Tensor], single: bool = False) -> str:
    return LossChecker(model, find_units(model).names).check(((), batch), single).why


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("name", ADDING)
def test_planning_accepts_additive_losses(name: str, single: bool) -> None:
    assert not why(judged(ADDING[name]), judged_batch(0), single)


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "by many rows"])
def test_planning_rejects_losses_that_are_not_additive(name: str) -> None:
    assert "is not proven additive" in why(judged(WHOLE[name]), judged_batch(0))


def test_forecast_distinguishes_reasons() -> None:
    assert "(a value is read (local_scalar_dense))" in why(judged(WHOLE["read by Python"]), judged_batch(0))
    assert "sums or means over rows" in why(judged(WHOLE["contrast"]), judged_batch(0))
    assert "returns no loss for the example batch" in why(Chain(), {"ids": chain_batch()["ids"]})
    assert not why(Chain(), chain_batch())
    assert "has too few rows to split" in why(Chain(), chain_batch(rows=1))


def reusing(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """Reads numbers in memory that tensors of as many rows had before, which were written to."""
    for _ in range(20):
        torch.zeros_like(mask).add_(1)
    kept = [torch.ones(mask.shape) for _ in range(200)]
    assert all(number.sum() > 0 for number in kept)
    return mean(x, y)


def test_memory_of_values_that_are_gone_says_nothing_of_new_ones() -> None:
    assert not why(judged(reusing), judged_batch(0))


def test_neither_model_nor_batch_need_values() -> None:
    with torch.device("meta"):
        model = judged(ADDING["mean"])
        batch = {name: torch.empty_like(t, device="meta") for name, t in judged_batch(0).items()}
    assert not why(model, batch)
    assert all(p.is_meta for p in model.parameters())  # unchanged


class Long(nn.Module):
    """Accepts rows of one length only."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.inner, self.tokens = Chain(), tokens

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if ids.shape[1] != self.tokens:
            raise ValueError(f"{self.tokens} tokens")
        return self.inner(ids, labels)["loss"]


@pytest.mark.parametrize("tokens", [TOKENS, 100])
def test_rows_are_shortened_if_the_model_runs_on_short_ones(tokens: int) -> None:
    assert not why(Long(tokens), chain_batch(tokens=tokens))
    with pytest.raises(CannotBeCut, match="7 tokens"):
        why(Long(7), chain_batch(tokens=9))


class Counted(nn.Linear):
    runs = 0

    def forward(self, x: Tensor) -> Tensor:
        Counted.runs += 1
        return super().forward(x)


class Deep(nn.Module):
    """Repeated layers, and convolutions that differ in their strides only."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Counted(16, 16) for _ in range(layers))
        self.folds = nn.ModuleList(nn.Conv1d(1, 1, 2, stride=s) for s in (1, 3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        first, other = (fold(x[:, None]) for fold in self.folds)
        return first.view(-1, 15).square().mean() + other.view(-1, 5).square().mean()


def test_one_of_several_repeated_layers_is_run() -> None:
    Counted.runs = 0
    assert not why(Deep(12), {"x": torch.ones(8, 16)})
    assert Counted.runs == 2  # with two and with four rows


class Lazy(nn.Module):
    """Repeats a constant only for several rows, as transformers models do with positions."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Chain()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        rows, tokens = ids.shape
        places = torch.ones(1, tokens)
        if rows > 1:
            places = places.expand(rows, -1)
        logits = self.inner(ids)["logits"] * places[..., None]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def test_repeating_a_constant_is_not_a_difference() -> None:
    assert not why(Lazy(), chain_batch(), single=True)
    lossy = judged(lambda m, x, y, k: total(x, y) if len(x) > 1 else mean(x, y))
    assert why(lossy, judged_batch(0), single=True)


# ---- costs
def asked_for(model: nn.Module, batch: dict[str, Tensor], schedule: str, **options: Any) -> SearchRequest:
    """The cost of a chain with a loss after its units for which autograd keeps tensors."""
    inside = "chain." if hasattr(model, "chain") else ""
    names = [inside + name for name in ("embed", *(f"layers.{i}" for i in range(4)), "norm", "head")]
    work = [
        ModuleWork(n, 1.0, 64.0, inputs=frozenset({(i, names[i - 1], 512)} if i else ()))
        for i, n in enumerate(names)
    ]
    taken = frozenset({(7, names[-1], 128)})
    work.append(ModuleWork("", 0.5, 960.0, inputs=taken, transient_bytes=320.0))
    request = SearchRequest(
        8,
        8,
        options={"schedule": schedule, **options},
        survey=Pipeline().survey(model),
        pipeline=PipelineQuery(work=tuple(work)),
    )
    return replace(request, pipeline=replace(request.pipeline, example=((), batch)))


def cost(model: nn.Module, batch: dict[str, Tensor], schedule: str, **options: Any) -> StrategyCost:
    return Pipeline().cost(asked_for(model, batch, schedule, **options), 2, LINK)


KEPT = 7 * 64 + 960
"""Bytes that autograd keeps of a microbatch."""


def held(cost: StrategyCost) -> float:
    assert cost.peak is not None
    return cost.activations * 4 * KEPT + cost.peak.transient_bytes


def test_loss_that_is_not_additive_is_costed_as_gpipe() -> None:
    batch = judged_batch(0)
    adds, whole = judged(ADDING["mean"]), judged(WHOLE["products"])
    late = {name: cost(whole, batch, name, microbatches=4) for name in ("1f1b", "gpipe")}
    soon = {name: cost(adds, batch, name, microbatches=4) for name in ("1f1b", "gpipe")}
    assert held(late["1f1b"]) == held(late["gpipe"]) and late["1f1b"].compute == late["gpipe"].compute
    assert held(late["1f1b"]) > held(soon["gpipe"]) > held(soon["1f1b"])
    (note,) = late["1f1b"].notes
    assert "activations of all 4 microbatches, as under gpipe: the loss is not proven additive" in note
    assert "\n" not in note and not soon["1f1b"].notes
    assert late["1f1b"].fields["pipeline"]["loss"] == "batch"
    assert soon["1f1b"].fields["pipeline"]["loss"] == "microbatches"
    first = cost(whole, batch, "1f1b", microbatches=1)
    assert not first.notes and "loss" not in first.fields["pipeline"]


def test_estimate_uses_forecast_for_other_microbatches() -> None:
    """A loss that is additive over microbatches of several rows, but not over those of one."""
    lossy = judged(lambda m, x, y, k: total(x, y) if len(x) > 1 else mean(x, y))
    request = asked_for(lossy, judged_batch(0), "gpipe")

    def loss(microbatches: int, rough: bool) -> Any:
        variant = replace(
            request,
            options={"schedule": "gpipe", "microbatches": microbatches},
            pipeline=replace(request.pipeline, estimate=rough),
        )
        return Pipeline().cost(variant, 2, LINK).fields["pipeline"]["loss"]

    assert [loss(4, True), loss(8, True), loss(8, False), loss(8, True)] == [
        "microbatches",
        "microbatches",  # not checked
        "batch",
        "batch",
    ]


def test_estimate_over_the_cutoff_skips_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[bool] = []
    look = LossChecker.check
    monkeypatch.setattr(LossChecker, "check", lambda *given: looks.append(given[2]) or look(*given))
    options = {"schedule": "1f1b", "microbatches": 4}
    request = replace(asked_for(judged(WHOLE["products"]), judged_batch(0), "1f1b"), options=options)

    def found(**changes: Any) -> StrategyCost:
        query = replace(request.pipeline, **changes)
        return Pipeline().cost(replace(request, pipeline=query), 2, LINK)

    least = found(estimate=True, cutoff_seconds=1e-3)
    assert not looks and "loss" not in least.fields["pipeline"]
    exact = found(estimate=True, cutoff_seconds=1e9)
    assert len(looks) == 1 and exact.fields["pipeline"]["loss"] == "batch"
    assert least.compute <= exact.compute  # an additive loss takes no longer
    assert found(cutoff_seconds=1e-3) == exact  # no estimate
    assert found(estimate=True, cutoff_seconds=1e-3) == exact  # the cached forecast is used
    assert len(looks) == 1


def test_tail_runs_once_between_forwards_and_backwards() -> None:
    """2 stages of 3 and 4 units; after them a loss of 4 x 0.5 s that keeps 4 x 960 bytes and its inputs."""
    result = cost(judged(WHOLE["products"]), judged_batch(0), "gpipe", microbatches=4)
    assert result.compute * 4 * 7.5 == pytest.approx((4 + 3 / 4) * 4 + 4 * 0.5)
    assert result.activations * 4 * KEPT == pytest.approx(4 * (4 * 64 + 960 + 128))
    assert result.peak is not None and result.peak.transient_bytes >= 4 * (320 + 128)


def test_gradients_of_tail_inputs_count_during_backwards() -> None:
    """4 x 128 bytes on the last rank, whose backwards have many transient bytes."""
    tail = replace(NO_WORK, inputs=frozenset({(7, "head", 128)}))
    step = Steps(1.0, (1.0, 1.0), (100.0, 100.0), (MemoryPeak(100, 5000, 0), MemoryPeak(100, 5000, 0)))
    first, last = with_tail(step, tail, 1, 4).fullest
    assert first == MemoryPeak(100, 5000, 0) and last == MemoryPeak(100, 5000 + 4 * 128, 0)


@pytest.mark.parametrize("name", NAMES)
def test_forwards_first_is_a_valid_schedule(name: str) -> None:
    schedule = ForwardsFirst(schedule_named(name))
    shape = Shape(2, 2 * schedule.inner.stages_each, 4)
    table = timetable(schedule, shape)
    assert schedule.name == name and table.alive == (4 * shape.each,) * 2
    for actions in table.ranks:
        kinds = "".join(action.kind for action in actions)
        assert kinds.startswith("F" * 4 * shape.each) and "F" not in kinds[4 * shape.each :]


def test_full_batch_plans_are_drawn_as_they_run() -> None:
    plan = judged_plan("1f1b")
    assert plan.pipeline is not None
    late = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": "batch"}))
    assert planned(plan).alive == (2, 1) and planned(late).alive == (4, 4)


# ---- the first step
def first_steps(
    rank: int, size: int, name: str, schedule: str, loss: str | None, memory: dict[str, int], hooked: bool
) -> list[list[str]]:
    """Warnings of three steps."""
    plan = judged_plan(schedule)
    assert plan.pipeline is not None
    plan = plan.replace(pipeline=plan.pipeline.model_copy(update={"loss": loss}))
    if memory:
        plan = plan.replace(
            predicted=Prediction(
                step_seconds=1.0,
                compute_seconds=1.0,
                communication_seconds=0.0,
                memory_bytes=memory,
                limit_bytes=3 << 30,
            )
        )
    model = judged((ADDING | WHOLE)[name])
    if hooked:
        model.chain.layers[1].register_forward_hook(watch_for_nan)
    many = pipeline(model, plan)
    told = []
    for step in (0, 1, 0):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            many(**judged_batch(step))
        told.append([str(first.message) for first in caught if "pipeline" in str(first.message)])
    return told


def watch_for_nan(module: nn.Module, args: Any, output: Tensor) -> None:
    if output.isnan().any():
        raise FloatingPointError(type(module).__name__)


def test_first_step_warns_once(rank_pool: RankPool) -> None:
    memory = {"activations": 1 << 30, "parameters": 1 << 30, "total": 2 << 30}
    first, second = rank_pool.run(2, first_steps, "by many rows", "1f1b", "microbatches", memory, False)
    assert second == [[], [], []] and first[1:] == [[], []]
    (told,) = first[0]
    assert "schedule '1f1b' of this pipeline is lost" in told
    assert "holds the activations of 4 microbatches, as under gpipe, where the schedule would hold 2" in told
    assert "the plan predicts, 2.0 GiB, becomes about 3.0 GiB, of the 3.0 GiB that a rank has" in told
    assert "not proven to add up over microbatches" in told
    ((told,), *_), _ = rank_pool.run(2, first_steps, "products", "1f1b", None, {}, False)
    assert "would hold 2. Why:" in told


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "schedule", "loss"),
    [("products", "1f1b", "batch"), ("products", "gpipe", "microbatches"), ("mean", "1f1b", None)],
)
def test_no_warning_if_planned_or_without_cost(
    rank_pool: RankPool, name: str, schedule: str, loss: str | None
) -> None:
    for told in rank_pool.run(2, first_steps, name, schedule, loss, {}, False):
        assert told == [[], [], []]
