"""A plan that is called feasible fits: ranks that carry it out never hold more than the limit that it was planned for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from zoo import llama

import meshwright as mw
from meshwright_dtensor.errors import InfeasibleError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.stages.optimizers import own_state
from meshwright_dtensor.strategy import Link, SearchRequest, StrategyCost
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.engine.grad_reduction import reduction_of
from meshwright_parallel.strategies.data import Data
from meshwright_planner.evaluation.context import allowing

sys.path.append(str(Path(__file__).parents[1] / "packages" / "planner" / "tests"))
from counting import Counting

CASES: dict[str, dict[str, Any]] = {
    "dp": {"dp": 2, "zero": 0, "tp": 1, "pp": 1},
    "zero": {"dp": 2, "zero": 3, "tp": 1, "pp": 1},
    "tp": {"tp": 2, "dp": 1, "pp": 1},
    "pp": {"pp": 2, "dp": 1, "tp": 1, "microbatches": 4, "schedule": "1f1b"},
}
OTHERS = {"cp": 1, "ep": 1, "recompute": None}


def build() -> nn.Module:
    """Large enough for tensors to be most of what there is."""
    torch.manual_seed(0)
    return llama(
        hidden_size=64, intermediate_size=192, num_hidden_layers=4, vocab_size=384, max_position_embeddings=64,
        attention_dropout=0.0, use_cache=False,
    )  # fmt: skip


def batch() -> dict[str, torch.Tensor]:
    """Rows enough for four microbatches."""
    ids = torch.randint(1, 384, (8, 48), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def planned(case: str, limit: int | None) -> ParallelPlan:
    """The plan for one way to lay the model over two ranks, with a limit of memory."""
    result = mw.plan(
        build(), batch(), world_size=2, cluster="laptop-cpu", memory_limit=limit, **OTHERS, **CASES[case]
    )
    assert isinstance(result, ParallelPlan) and result.predicted is not None
    return result


def held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The local tensors that a rank has between steps."""
    with own_state(model, optimizer):
        states = [x for entries in optimizer.state.values() for x in entries.values()]
        for tensor in (*model.parameters(), *model.buffers(), *states):
            if isinstance(tensor, torch.Tensor):
                yield getattr(tensor, "_local_tensor", tensor).detach()


def peak(rank: int, size: int, text: str, rooted: bool = False) -> int:
    """Most bytes of tensors at once on this rank, in a step that others came before."""
    model = mw.parallelize(Rooted() if rooted else build(), ParallelPlan.from_json(text), batch=batch())
    return counted_peak(model, lambda: model(**batch()).loss)


def counted_peak(model: nn.Module, loss: Callable[[], torch.Tensor]) -> int:
    """The same of any model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    with Counting(held(model, optimizer)) as counting:
        step()
        counting.restart()
        step()
        return counting.peak


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_was_called_feasible_fits(rank_pool: RankPool, case: str) -> None:
    """Planned for just the memory that the planner says is needed, and not for less."""
    free = planned(case, None)
    assert free.predicted is not None
    limit = allowing(free.predicted.total_bytes)
    tight = planned(case, limit)
    assert tight.predicted is not None and tight.predicted.total_bytes <= limit
    counted = max(rank_pool.run(2, peak, tight.to_json()))
    assert counted <= limit, f"{case}: {counted} bytes counted, {limit} allowed"
    assert counted >= 0.9 * limit  # the limit was no empty one


class Large(nn.Module):
    """With gradients of more than 4 MiB, and activations that are most of what a step holds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(16, 1088)
        self.layers = nn.ModuleList(nn.Linear(1088, 1088, bias=False) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
            for _ in range(10):
                x = x.tanh()  # its backward makes nothing but the gradient
        return x.float().mean()


def peak_of_large(rank: int, size: int, text: str) -> int:
    """As `peak`."""
    model = mw.parallelize(Large(), ParallelPlan.from_json(text), batch={"ids": LARGE_IDS})
    return counted_peak(model, lambda: model(LARGE_IDS))


LARGE_IDS = torch.arange(1024) % 16


@pytest.mark.slow
@pytest.mark.parametrize("precision", [None, "bf16"])
def test_memory_of_large_gradients_that_stays_is_planned_for(
    rank_pool: RankPool, precision: str | None
) -> None:
    """In another precision even large gradients are in buckets, whose memory stays from step to step."""
    pins = {**OTHERS, **CASES["dp"], "precision": precision}
    free = mw.plan(Large(), {"ids": LARGE_IDS}, world_size=2, cluster="laptop-cpu", **pins)
    assert free.predicted is not None
    limit = allowing(free.predicted.total_bytes)
    counted = max(rank_pool.run(2, peak_of_large, free.to_json()))
    assert counted <= limit, f"{counted} bytes counted, {limit} allowed"
    assert counted >= 0.9 * limit


class Rooted(nn.Module):
    """With a loss that does not add up over microbatches."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = build()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.inner(input_ids=input_ids, labels=labels)
        out.loss = out.loss.sqrt()
        return out


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_a_loss_of_the_whole_batch_takes_is_planned_for(rank_pool: RankPool, schedule: str) -> None:
    """All microbatches are held, whatever the schedule: a plan that fits fits, and says why it needs so much."""
    pins = {**OTHERS, **CASES["pp"], "schedule": schedule}
    free, adding, full = (
        mw.plan(model, batch(), world_size=2, cluster="laptop-cpu", **{**pins, **other})
        for model, other in (
            (Rooted(), {}),
            (build(), {}),
            (Rooted(), {"schedule": "gpipe" if schedule == "1f1b" else "looped-bfs"}),
        )
    )
    assert free.predicted is not None and adding.predicted is not None and full.predicted is not None
    assert free.predicted.total_bytes == full.predicted.total_bytes > 1.5 * adding.predicted.total_bytes
    assert free.pipeline is not None and free.pipeline.loss == "batch"
    notes = [note for note in free.provenance.notes if "as under gpipe" in note]
    assert len(notes) == 1 and "is not proven additive over microbatches" in notes[0]
    assert notes[0] in " ".join(str(mw.explain(free)).split())
    assert "as under gpipe" not in " ".join(str(mw.explain(adding)).split())
    counted = max(rank_pool.run(2, peak, free.to_json(), True))
    assert 0.9 * free.predicted.total_bytes <= counted <= allowing(free.predicted.total_bytes)
    assert counted > 1.5 * adding.predicted.total_bytes  # what a plan that does not know would have said


def step_of(rank: int, size: int, text: str) -> tuple[int, list[str]]:
    """The same, and what differs from one device in a step: losses, gradients, parameters."""
    report = mw.verify(build, batch(), ParallelPlan.from_json(text))
    return peak(rank, size, text), [f"{f.kind} {f.name} {f.difference}" for f in report.failures]


def again(plan: ParallelPlan) -> list[set[int]]:
    """Per stage, the numbers of the layers that run again."""
    assert plan.pipeline is not None
    return [
        {int(name[13:]) for name in stage if any(rule.matches(name) for rule in plan.recompute)}
        for stage in plan.pipeline.stages
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("part", "layers"), [(0.95, [{0}, set()]), (0.75, [{0, 1}, {2}])])
def test_each_stage_runs_again_what_its_memory_asks_for(
    rank_pool: RankPool, part: float, layers: list[set[int]]
) -> None:
    """The first stage holds two microbatches where the last holds one: it runs layers again first, and alone."""
    free = planned("pp", None)
    assert free.predicted is not None and not free.recompute
    limit = allowing(int(part * free.predicted.total_bytes))
    tight = planned("pp", limit)
    assert tight.predicted is not None and again(tight) == layers
    uniform = mw.plan(
        build(), batch(), world_size=2, cluster="laptop-cpu", **{**OTHERS, **CASES["pp"], "recompute": "full"}
    )
    assert isinstance(uniform, ParallelPlan) and uniform.predicted is not None
    assert free.predicted.step_seconds < tight.predicted.step_seconds < uniform.predicted.step_seconds
    for counted, failures in rank_pool.run(2, step_of, tight.to_json()):
        assert not failures
        assert 0.75 * tight.predicted.total_bytes <= counted <= limit


@pytest.mark.slow
def test_what_does_not_fit_is_counted_and_refused(rank_pool: RankPool) -> None:
    """The negative control: replicas do hold more than sharing takes; planned for that much they recompute, or are refused."""
    free, shared = planned("dp", None), planned("zero", None).predicted
    assert shared is not None and not free.recompute
    limit = allowing(shared.total_bytes)
    assert max(rank_pool.run(2, peak, free.to_json())) > limit
    tight = planned("dp", limit)
    assert tight.recompute and max(rank_pool.run(2, peak, tight.to_json())) <= limit
    with pytest.raises(InfeasibleError):
        planned("dp", limit // 2)


def experts() -> nn.Module:
    """With weights of all experts of 6 MiB, and of half of them of 3."""
    torch.manual_seed(0)
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            hidden_size=256, intermediate_size=384, num_hidden_layers=1, vocab_size=96, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64, num_local_experts=8, num_experts_per_tok=2,
        )
    )  # fmt: skip


def few_tokens() -> dict[str, torch.Tensor]:
    """A row for each of four ranks."""
    ids = torch.arange(24).view(4, 6)
    return {"input_ids": ids, "labels": ids}


def staying(rank: int, size: int, text: str) -> int:
    """Bytes of gradients whose memory is there between steps."""
    model = mw.parallelize(experts(), ParallelPlan.from_json(text), batch=few_tokens())
    for _ in range(3):
        model(**few_tokens()).loss.backward()
        model.zero_grad()
    engine = reduction_of(model)
    assert engine is not None
    return sum(b.numel * b.dtype.itemsize for b in engine._buckets if b.previous is not None)


@pytest.mark.slow
def test_what_stays_of_gradients_of_experts(rank_pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes by what a rank has of them, half."""
    notes: list[float] = []
    cost = Data.cost

    def seen(self: Data, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        result = cost(self, request, degree, link)
        notes.append(result.persistent_gradients * request.sizes.gradient_bytes)
        return result

    monkeypatch.setattr(Data, "cost", seen)
    pins = {"dp": 2, "ep": 2, "tp": 1, "pp": 1, "cp": 1, "zero": 0, "recompute": None}
    plan = mw.plan(experts(), few_tokens(), world_size=4, cluster="laptop-cpu", **pins)
    assert isinstance(plan, ParallelPlan)
    for result in rank_pool.run(4, staying, plan.to_json()):
        assert result == pytest.approx(notes[-1], rel=1e-3)
