"""What is searched and what is pinned: degrees, axes, strategies, options; and what cannot be had."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from planner_models import (
    DGX_H100,
    LAPTOP_CPU,
    DataLike,
    Mlp,
    TensorLike,
    Transformer,
    best,
    eager,
    host_of,
    manual,
    tokens,
)
from torch import nn

from meshwright_dtensor.errors import PlanError, PluginError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, StrategySpec
from meshwright_dtensor.strategy import Link, PlanRequest, SearchRequest, StrategyCost
from meshwright_planner import EagerPlanner, ManualPlanner, explain


def test_degrees_are_searched_and_pins_kept() -> None:
    model, batch = Transformer(), tokens(rows=8)
    plans = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=9))
    assert {tuple(p.degrees.values()) for p in plans} == {(4, 1), (2, 2), (1, 4)}
    seconds = [p.predicted.step_seconds for p in plans if p.predicted]
    assert seconds == sorted(seconds)
    assert dict(best(model, batch, world_size=4, tp=2).degrees) == {"dp": 2, "tp": 2}
    assert dict(best(model, batch, world_size=4, dp=1).degrees) == {"dp": 1, "tp": 4}


class Late(DataLike):
    """Refuses two ranks, but only when it is asked exactly, as one may whose estimates are far from the best."""

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        if degree == 2 and not request.pipeline.estimate:
            raise PlanError("degrees.dp", degree, "two are one too few", "1")
        return super().cost(request, degree, link)


def test_configuration_refused_in_exact_evaluation_is_not_chosen() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=9)
    planner = EagerPlanner(host_of(Late, TensorLike))
    plans = planner.plan(Transformer(), tokens(rows=8), request)
    assert {tuple(p.degrees.values()) for p in plans} == {(4, 1), (1, 4)}


class Never(Late):
    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [2]


class Chosen(DataLike):
    """Lets one choose a number, and yes or no."""

    def ways(self, request: SearchRequest, degree: int) -> Iterable[dict[str, object]]:
        return [{"overlap": overlap, "pieces": n} for n in range(1, 17) for overlap in (True, False)]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        CHOSEN.append((pieces := request.options["pieces"], overlap := request.options["overlap"]))
        base = super().cost(request, degree, link)
        return replace(base, exposed_seconds=base.exposed_seconds + abs(pieces - 5) + overlap)


CHOSEN: list[tuple[int, bool]] = []


def test_boolean_options_are_all_tried_and_numbers_step_by_step() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, dp=4)
    (plan,) = EagerPlanner(host_of(Chosen, TensorLike)).plan(Transformer(), tokens(rows=8), request)
    assert plan.predicted is not None and plan.predicted.step_seconds < 1
    assert (5, False) in CHOSEN


def test_refusal_is_raised_when_every_exact_evaluation_is_refused() -> None:
    with pytest.raises(PlanError, match="two are one too few"):
        EagerPlanner(host_of(Never)).plan(
            Transformer(), tokens(rows=8), PlanRequest(cluster=LAPTOP_CPU, world_size=2)
        )


class Rival(TensorLike):
    name: ClassVar[str] = "tensor-too"


def test_note_names_a_strategy_that_is_not_searched() -> None:
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=2)
    (plan,) = EagerPlanner(host_of(DataLike, TensorLike, Rival)).plan(Transformer(), tokens(), request)
    assert "tensor" in plan.strategies.values()
    (line,) = [note for note in plan.provenance.notes if note.startswith("not searched")]
    assert (
        "'tensor-too'" in line
        and "'tensor' comes before it on the axis 'tp'" in line
        and line in str(explain(plan, 300))
    )


@pytest.mark.parametrize("field", ["name", "axis"])
def test_strategy_record_that_contradicts_its_class_is_refused(field: str) -> None:
    (registered,) = host_of(TensorLike).strategies().values()
    record = replace(registered.record, **{field: "other"})
    host = PluginHost({StrategySpec: {record.name: replace(registered, record=record)}})
    with pytest.raises(PluginError, match=rf"{field} 'other', but its class has {field} = "):
        EagerPlanner(host).plan(Transformer(), tokens(), PlanRequest(cluster=LAPTOP_CPU, world_size=2))


def test_manual_planner_keeps_the_given_degrees() -> None:
    def plan(**options: Any) -> ParallelPlan:
        return manual().plan(Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, **options))[0]

    assert dict(plan(world_size=4, tp=2).degrees) == {"dp": 2, "tp": 2}
    assert plan(world_size=4, tp=2).provenance.planner == "manual"
    assert dict(plan(world_size=4).degrees) == {"dp": 4, "tp": 1}
    predicted = plan(world_size=4, tp=2).predicted  # which proves nothing
    assert predicted is not None and predicted.gap is None and "no others compared" in str(predicted.proof)
    with pytest.raises(UsageError, match="dp=2 x tp=1 is 2 ranks, but world_size is 4"):
        plan(world_size=4, dp=2)


class Other(DataLike):
    name: ClassVar[str] = "other"
    axis: ClassVar[str] = "wide"
    order: ClassVar[int] = 50


def test_pin_on_an_axis_of_a_plugin() -> None:
    host = host_of(DataLike, TensorLike, Other)

    def plan(**options: Any) -> ParallelPlan:
        request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, **options)
        return EagerPlanner(host).plan(Transformer(), tokens(rows=4), request)[0]

    assert dict(plan(tp=2, degrees={"wide": 2}).degrees) == {"dp": 1, "tp": 2, "wide": 2}
    assert plan(degrees={"wide": 1}).degree("wide") == 1 and plan(degrees={"wide": 4}).degree("wide") == 4
    by_hand = ManualPlanner(host).plan(
        Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, world_size=4, degrees={"wide": 2})
    )
    assert dict(by_hand[0].degrees) == {"dp": 2, "tp": 1, "wide": 2}
    for degrees, told in (
        ({"wdie": 2}, r"no installed strategy owns .* \(axes without a keyword: wide\); did you mean 'wide'"),
        ({"tp": 2}, "the axis 'tp' has a keyword of its own; give tp=2"),
        ({"zero": 2}, "give zero_degree=2"),
        ({"wide": 0}, "=0 is less than 1"),
        ({"wide": "2"}, "='2' is not an integer"),
        ({"wide": None}, "leave the axis out to have it searched"),
        ({"wide": 3}, "wide=3 is not a legal degree"),
        ("wide", "is no mapping"),
    ):
        with pytest.raises(UsageError, match=told):
            plan(degrees=degrees)


@pytest.mark.parametrize(
    ("model", "tp", "told"),
    [
        (Mlp(), 3, "no computation is divided along tp 3: all its ranks do the same work, because none of its sizes"),
        (
            Transformer(hidden=4096, layers=2, vocab=8192),
            7,
            r"all ranks of tp 7 repeat \d+% of products and attention \(layers\.0\.attention.*, and copies",
        ),
        (Transformer(layers=2), 2, None),
    ],
)  # fmt: skip
def test_note_names_replicated_work_on_a_searched_axis(model: nn.Module, tp: int, told: str | None) -> None:
    batch = torch.randn(2, 64) if isinstance(model, Mlp) else tokens(rows=2)
    notes = best(model, batch, cluster=DGX_H100, world_size=tp, tp=tp).provenance.notes
    replicated = [note for note in notes if "divided by" in note or "do the same" in note or "repeat" in note]
    assert [bool(re.match(told or "", note)) for note in replicated] == ([] if told is None else [True])
    assert all("give tp another degree" in note for note in replicated)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.layer, self.out = kind(32, 32), nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.layer(x)[0]).square().mean()


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_notes_name_recurrent_layers_as_whole(kind: type[nn.RNNBase]) -> None:
    notes = best(Recurrent(kind), torch.randn(4, 6, 32), world_size=2, tp=2).provenance.notes
    why = "each step of a recurrent layer needs the whole hidden state"
    (work,) = [note for note in notes if "repeat" in note or "do the same" in note]
    (weights,) = [note for note in notes if "of the weights" in note]
    assert (
        why in work and "tp 2 shards" in weights and f"layer ({kind.__name__}, " in weights and why in weights
    )


def test_notes_say_why_weights_are_whole() -> None:
    def weights(model: nn.Module, batch: Any, tp: int) -> list[str]:
        notes = best(model, batch, cluster=DGX_H100, world_size=tp, tp=tp).provenance.notes
        return [note for note in notes if "of the weights" in note]

    (note,) = weights(Mlp(), torch.randn(2, 64), 3)
    assert note.startswith("tp 3 shards 0% of the weights") and "no size is a multiple of 3" in note
    assert not weights(Transformer(layers=2), tokens(rows=2), 2)


def test_sequence_parallel_needs_a_part_of_the_sequence_for_each_rank() -> None:
    def plan(length: int = 32, **options: Any) -> ParallelPlan:
        batch = tokens(rows=4, length=length)
        return best(Transformer(), batch, world_size=4, sequence_parallel=True, **options)

    assert plan().sequence_parallel and plan().degree("tp") > 1  # never only data ranks
    # ranks may have parts of unequal lengths
    assert plan(31, tp=4).sequence_parallel and plan(31, tp=2).sequence_parallel
    assert not best(Transformer(), tokens(), sequence_parallel=True).sequence_parallel  # one rank
    needs = "^sequence_parallel=True needs a tensor axis with a degree above 1"
    for options, told in (
        ({"tp": 1}, ", and tp=1 leaves it none: change that, or leave sequence_parallel out"),
        ({"dp": 4}, ", and dp=4 leaves it none: change that, or leave sequence_parallel out"),
        (
            {"tp": 4, "length": 9},
            r" that leaves each rank a part of the sequence \(9 tokens\), the last one too; tp=4 does not: pad the batch",
        ),
    ):
        with pytest.raises(UsageError, match=needs + told):
            plan(**options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="no tensor between repeated blocks of this Mlp"):
        best(Mlp(), torch.randn(4, 64), world_size=2, tp=2, sequence_parallel=True)


@pytest.mark.parametrize(
    "option",
    [{"pp": 2}, {"cp": 2}, {"ep": 4}, {"zero": 1}, {"microbatches": 4}, {"schedule": "1f1b"},
     {"recompute": True}, {"compile": True}, {"precision": "int3"}, {"zero": 4},
     {"zero_degree": 2}, {"tp": 0},
     {"time_budget": "3s"}, {"time_budget": float("inf")}, {"keep_user_sharding": "no"}, {"sequence_parallel": "no"},
     {"world_size": -1}, {"tp": 3, "world_size": 4}, {"optimizer": "adamx"}, {"tp": True}],
)  # fmt: skip
def test_impossible_option_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        best(Transformer(layers=1), tokens(), **option)


def test_pin_of_one_on_an_axis_without_strategy_is_ignored() -> None:
    assert "pp" not in best(Transformer(layers=1), tokens(), pp=1, cp=1, ep=1).degrees


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_batch_with_any_number_of_rows(rows: int) -> None:
    """Also fewer than the two numbers of rows that others follow from."""
    for world in (1, 2):
        plan = best(Transformer(), tokens(rows=rows), world_size=world)
        assert plan.predicted is not None and plan.predicted.step_seconds > 0
