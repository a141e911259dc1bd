"""Whole plans: placements that are known to be right, pins, batches, errors."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from planner_models import DataLike, Mlp, TensorLike, Transformer, eager, host_of, manual, tokens
from torch import nn

from meshwright_dtensor.errors import InfeasibleError, PluginError, UnsupportedError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.planning import PlanRequest
from meshwright_dtensor.plugins import PluginHost, StrategySpec
from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner import EagerPlanner, ManualPlanner, explain
from meshwright_planner.machines.known import DGX_H100, LAPTOP_CPU
from meshwright_planner.profile.batch import Batch
from meshwright_planner.profile.recording import record
from meshwright_planner.search.setting import allowing


def best(model: nn.Module, batch: Any, **options: Any) -> ParallelPlan:
    options = {"cluster": LAPTOP_CPU, **options}
    return eager().plan(model, batch, PlanRequest(**options))[0]


def state(plan: ParallelPlan, name: str, axis: str = "tp") -> Any:
    return plan.parameter_states(name)[axis]


def test_mlp_is_column_then_row() -> None:
    plan = best(Mlp(), torch.randn(4, 16, 64), world_size=2, tp=2)
    assert [state(plan, n) for n in ("up.weight", "up.bias", "down.weight")] == [0, 0, 1]
    forward = [c for c in plan.collectives if c.phase == "forward"]
    assert [(c.kind, c.nbytes, c.count) for c in forward] == [("all_reduce", 4 * 16 * 64 * 4, 1)]


def test_block_is_megatrons() -> None:
    plan = best(Transformer(vocab=8192), tokens(vocab=8192), world_size=4, tp=4)
    for layer in range(3):
        for name in ("attention.q", "attention.k", "attention.v", "mlp.up"):
            assert state(plan, f"layers.{layer}.{name}.weight") == 0
        for name in ("attention.o", "mlp.down"):
            assert state(plan, f"layers.{layer}.{name}.weight") == 1
        assert state(plan, f"layers.{layer}.norm1.weight") == "I"
    assert state(plan, "head.weight") == 0  # the loss reads its shards of the vocabulary
    assert any(c.why == "inside cross_entropy" for c in plan.collectives)


def test_q_k_v_share_one_collective() -> None:
    plan = best(Transformer(layers=3), tokens(rows=1, length=64), world_size=4, tp=4)
    into = [c for c in plan.collectives if c.module == "layers.*.attention.q"]
    assert sum(c.count for c in into if c.phase == "backward") == 3  # one a layer, not three
    assert not any(c.module in ("layers.*.attention.k", "layers.*.attention.v") for c in plan.collectives)


def test_tied_embedding_is_vocabulary_parallel() -> None:
    plan = best(Transformer(tied=True, vocab=4096), tokens(vocab=4096), world_size=2, tp=2)
    assert state(plan, "embed.weight") == state(plan, "head.weight") == 0


def test_odd_sizes_stay_replicated() -> None:
    model = nn.Sequential(nn.Linear(63, 65), nn.ReLU(), nn.Linear(65, 31))
    plan = best(model, torch.randn(5, 63), world_size=2, tp=2)
    assert plan.parameters == ()
    even = best(
        nn.Sequential(nn.Linear(63, 64), nn.ReLU(), nn.Linear(64, 31)), torch.randn(5, 63), world_size=2, tp=2
    )
    assert [state(even, "0.weight"), state(even, "2.weight")] == [0, 1]


def test_repeated_blocks_are_written_once() -> None:
    plan = best(Transformer(layers=12), tokens(), world_size=2, tp=2)
    patterns = [rule.pattern for rule in plan.parameters]
    assert "layers.*.attention.q.weight" in patterns and len(patterns) == 9
    assert all("layers.0." not in rule.module for rule in plan.activations)


def test_blocks_that_differ_are_not_merged() -> None:
    model = Transformer(layers=4)
    model.layers[2].mlp = Mlp(64, 129)  # the inner size does not divide, the outer does
    plan = best(model, tokens(), world_size=2, tp=2)
    assert [state(plan, f"layers.{i}.mlp.up.weight") for i in range(4)] == [0, 0, 1, 0]


def test_a_model_that_needs_more_rows_than_a_rank_has() -> None:
    """Norms of the batch refuse one row; on ranks they see the rows of all."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    plans = eager().plan(
        model, torch.randn(4, 16), PlanRequest(cluster=LAPTOP_CPU, world_size=4, dp=4, top_k=2)
    )
    assert plans[0].degrees["dp"] == 4
    with pytest.raises(UsageError, match="Expected more than 1 value per channel"):
        eager().plan(model, torch.randn(1, 16), PlanRequest(cluster=LAPTOP_CPU, world_size=1))


def test_degrees_are_searched_and_pins_kept() -> None:
    model, batch = Transformer(), tokens(rows=8)
    plans = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=9))
    assert {tuple(p.degrees.values()) for p in plans} == {(4, 1), (2, 2), (1, 4)}
    seconds = [p.predicted.step_seconds for p in plans if p.predicted]
    assert seconds == sorted(seconds)
    assert dict(best(model, batch, world_size=4, tp=2).degrees) == {"dp": 2, "tp": 2}
    assert dict(best(model, batch, world_size=4, dp=1).degrees) == {"dp": 1, "tp": 4}


class Rival(TensorLike):
    name: ClassVar[str] = "tensor-too"


def test_a_strategy_that_is_not_searched_is_named() -> None:
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
def test_a_record_that_contradicts_its_class_is_refused(field: str) -> None:
    (registered,) = host_of(TensorLike).strategies().values()
    record = replace(registered.record, **{field: "other"})
    host = PluginHost({StrategySpec: {record.name: replace(registered, record=record)}})
    with pytest.raises(PluginError, match=rf"{field} 'other', but its class has {field} = "):
        EagerPlanner(host).plan(Transformer(), tokens(), PlanRequest(cluster=LAPTOP_CPU, world_size=2))


def test_manual_takes_the_degrees_as_given() -> None:
    def plan(**options: Any) -> ParallelPlan:
        return manual().plan(Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, **options))[0]

    assert dict(plan(world_size=4, tp=2).degrees) == {"dp": 2, "tp": 2}
    assert plan(world_size=4, tp=2).provenance.planner == "manual"
    assert dict(plan(world_size=4).degrees) == {"dp": 4, "tp": 1}
    with pytest.raises(UsageError, match="dp=2 x tp=1 is 2 ranks, but world_size is 4"):
        plan(world_size=4, dp=2)


class Other(DataLike):
    name: ClassVar[str] = "other"
    axis: ClassVar[str] = "wide"
    order: ClassVar[int] = 50


def test_an_axis_of_a_plugin_is_pinned() -> None:
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


def test_a_sequence_that_is_to_be_split_must_be_divisible() -> None:
    def plan(length: int = 32, **options: Any) -> ParallelPlan:
        batch = tokens(rows=4, length=length)
        return best(Transformer(), batch, world_size=4, sequence_parallel=True, **options)

    assert plan().sequence_parallel and plan().degree("tp") > 1  # never only data ranks
    assert dict(plan(30).degrees) == {"dp": 2, "tp": 2}  # 4 does not divide 30
    assert not best(Transformer(), tokens(), sequence_parallel=True).sequence_parallel  # one rank
    for options in ({"tp": 1, "dp": 4}, {"length": 31}, {"tp": 4, "length": 30}):
        with pytest.raises(
            UsageError, match="sequence_parallel=True needs a tensor axis of a degree above 1"
        ):
            plan(**options)
    with pytest.raises(UsageError, match="no value that flows between repeated blocks of this Mlp"):
        best(Mlp(), torch.randn(4, 64), world_size=2, tp=2, sequence_parallel=True)


def test_one_rank_is_trivial() -> None:
    plan = best(Transformer(), tokens())
    assert plan.world_size == 1 and plan.parameters == plan.activations == plan.collectives == ()
    assert plan.predicted is not None and plan.predicted.memory_bytes["parameters"] > 0


def test_equal_requests_give_equal_plans_and_json_round_trips() -> None:
    first, second = (best(Transformer(), tokens(), world_size=4, tp=2) for _ in range(2))
    assert first == second and first.to_json() == second.to_json()
    assert ParallelPlan.from_json(first.to_json()) == first
    assert first != best(Transformer(layers=2), tokens(), world_size=4, tp=2)


def test_memory_of_a_model_that_is_only_parameters() -> None:
    model = nn.Linear(256, 256, bias=False)
    for optimizer, states in (("adamw", 2), ("sgd", 0), ("sgd-momentum", 1)):
        plan = best(model, torch.randn(2, 256), optimizer=optimizer)
        assert plan.predicted is not None
        memory = plan.predicted.memory_bytes
        size = 256 * 256 * 4
        assert (memory["parameters"], memory["gradients"], memory["optimizer"]) == (size, size, states * size)
        assert memory["activations"] == 0  # it holds most when the optimizer steps, after the backward pass
    half = best(model, torch.randn(2, 256), world_size=2, tp=2)
    assert half.predicted is not None and half.predicted.memory_bytes["parameters"] == size // 2


def test_infeasible_says_by_how_much_and_what_would_fit() -> None:
    model = Transformer(layers=2, hidden=128)
    whole = best(model, tokens(rows=2)).predicted
    assert whole is not None
    small = replace(LAPTOP_CPU, memory_bytes=int(whole.total_bytes * 0.6))
    with pytest.raises(InfeasibleError) as caught:
        best(model, tokens(rows=2), cluster=small, world_size=1)
    text = str(caught.value)
    assert (
        "dp 1 x tp 1 needs" in text  # the optimizer's step holds most: recomputing would change nothing
        and "too much" in text
        and "world_size=2: dp 1 x tp 2" in text
    )
    lines = text.splitlines()
    assert lines[0].startswith("no plan for 1 rank(s)") and "Would fit:" in lines
    assert max(map(len, lines)) <= 100 - len("Error: ")
    reasons = [line for line in lines if line.startswith("  - ")]
    assert sum("too much" in line for line in reasons) == 1 and len(reasons) > 2
    assert any(line.startswith("  - world_size=2: dp 1 x tp 2") for line in reasons)
    # the negative control: what is advised does fit
    assert best(model, tokens(rows=2), cluster=small, world_size=2, tp=2).degree("tp") == 2


@pytest.mark.parametrize("world_size", [1, 4])
def test_infeasible_names_a_memory_that_is_enough(world_size: int) -> None:
    """However small the limit, one fix is left, and it works."""
    model = Transformer(layers=2, hidden=128)
    with pytest.raises(InfeasibleError, match=r"Would fit:\n(.*\n)*  - memory_limit=") as caught:
        best(model, tokens(rows=2), world_size=world_size, memory_limit=1000)
    found = re.search(r"memory_limit=(\d+)", str(caught.value))
    assert found is not None
    enough = int(found[1])
    plan = best(model, tokens(rows=2), world_size=world_size, memory_limit=enough)
    assert plan.predicted is not None and plan.predicted.total_bytes <= enough
    with pytest.raises(InfeasibleError):
        best(model, tokens(rows=2), world_size=world_size, memory_limit=enough * 9 // 10)


def test_memory_limit_changes_the_winner() -> None:
    model, batch = Transformer(layers=2, hidden=128), tokens(rows=4)
    fast, *others = eager().plan(model, batch, PlanRequest(cluster=DGX_H100, world_size=4, top_k=9))
    least = min(p.predicted.total_bytes for p in others if p.predicted)
    assert fast.predicted is not None and fast.predicted.total_bytes > least
    tight = best(model, batch, cluster=DGX_H100, world_size=4, memory_limit=allowing(least))
    assert tight.predicted is not None and tight.predicted.total_bytes <= least


@pytest.mark.parametrize(
    "option",
    [{"pp": 2}, {"cp": 2}, {"ep": 4}, {"zero": 1}, {"microbatches": 4}, {"schedule": "1f1b"},
     {"recompute": True}, {"compile": True}, {"precision": "int3"}, {"zero": 4},
     {"zero_degree": 2}, {"tp": 0},
     {"world_size": -1}, {"tp": 3, "world_size": 4}, {"optimizer": "adamx"}, {"tp": True}],
)  # fmt: skip
def test_what_cannot_be_had_is_refused_by_name(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=next(iter(option))):
        best(Transformer(layers=1), tokens(), **option)


def test_degree_one_of_an_unowned_axis_asks_for_nothing() -> None:
    assert "pp" not in best(Transformer(layers=1), tokens(), pp=1, cp=1, ep=1).degrees


def test_a_batch_that_the_model_does_not_take() -> None:
    with pytest.raises(UsageError, match=r"Transformer.forward .*'idz'; it accepts: ids.*, labels") as caught:
        best(Transformer(layers=1), {"idz": torch.zeros(2, 8, dtype=torch.long), **tokens()})
    assert caught.value.__cause__ is None
    for bad in ({}, 3, {"ids": [1, 2]}):
        with pytest.raises(UsageError, match="batch"):
            best(Transformer(layers=1), bad)
    with pytest.raises(UsageError, match="Mlp raised"):
        best(Mlp(), torch.randn(2, 63))


def test_the_model_is_left_as_it_was() -> None:
    class Remembers(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            self.act = nn.Tanh()  # some models replace layers when they see their first input
            return super().forward(F.dropout(x, 0.5, self.training))

    model = Remembers()
    model.act = own = nn.ReLU()
    before = {n: (id(p), p.clone()) for n, p in model.named_parameters()}
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    best(model, torch.randn(4, 64), world_size=2, tp=2)
    torch.manual_seed(3)
    plan = best(model, torch.zeros(4, 64), world_size=2, tp=2)
    assert torch.equal(torch.get_rng_state(), rng) and plan.degree("tp") == 2
    after = dict(model.named_parameters())
    assert all(id(after[n]) == i and torch.equal(after[n], p) for n, (i, p) in before.items())
    assert model.act is own
    assert not hasattr(model, "seen") and all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks and type(model.up.weight) is nn.Parameter


def test_meta_models_and_meta_batches() -> None:
    with torch.device("meta"):
        model = Transformer()
        batch = tokens()
    real = best(Transformer(), tokens(), world_size=2, tp=2)
    assert best(model, batch, world_size=2, tp=2) == real
    assert all(p.is_meta for p in model.parameters())


def test_global_batch_size_scales_the_example() -> None:
    model = Transformer(layers=1)
    scaled = best(model, tokens(rows=2), global_batch_size=8, world_size=4, dp=4)
    assert scaled == best(model, tokens(rows=8), world_size=4, dp=4)
    with pytest.raises(UsageError, match="dp=4 is not a legal degree"):
        best(model, tokens(rows=2), world_size=4, dp=4)


class Picky(nn.Module):
    """Looks at its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y.sum(-1) > -1e9].sum() if bool((y > -1e9).all()) else y.sum()


def test_a_model_that_looks_at_its_data_is_run_for_real() -> None:
    plan = best(Picky(), torch.randn(4, 8))
    assert any("real run" in note for note in plan.provenance.notes)
    assert not any("real run" in note for note in best(Mlp(), torch.randn(4, 64)).provenance.notes)
    with torch.device("meta"):
        meta = Picky()
    assert best(meta, torch.randn(4, 8)).world_size == 1
    with torch.device("meta"):
        meta.linear = nn.Linear(8, 8)
        meta.table = nn.Embedding(2**28, 8)
    with pytest.raises(UnsupportedError, match="Picky looks at the data"):
        best(meta, torch.randn(4, 8))


def test_explain_shows_candidates_and_reason() -> None:
    plans = eager().plan(
        Transformer(), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=3)
    )
    text = str(explain(plans))
    for word in (
        "dp",
        "tp",
        "step",
        "compute",
        "exposed comm",
        "optimizer",
        "memory",
        "bound by",
        "faster than",
    ):
        assert word in text
    assert "also considered" in str(explain(plans[0])) and str(explain([])) == "no plans\n"


class ReadsIntegers(Mlp):
    """Looks at the integers of its batch, and at what becomes of them, but at no floating-point value."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.all()) and int(torch.arange(len(x)).max()) == len(x) - 1:
            return super().forward(x)
        return super().forward(x * mask[:, None])


def test_integers_may_be_looked_at_without_a_real_run() -> None:
    def operations(mask: torch.Tensor) -> int:
        batch = {"x": torch.randn(4, 64), "mask": mask}
        tape = record(ReadsIntegers(), Batch.of(batch), RuleBook.first_party().composites)
        assert not tape.real
        return len(tape.nodes)

    ones = torch.ones(4, dtype=torch.long)
    assert operations(ones) == operations(ones.to("meta")) < operations(torch.tensor([1, 1, 0, 1]))
