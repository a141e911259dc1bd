"""Mixed precision against a hand-written loop on one device: 16-bit copies of float32 master weights."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parallel_models import Language, batch_of, full, make, plan_of
from torch import nn
from torch.distributed.tensor import DTensor

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import GradScaler, clip_grad_norm_, parallelize

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def by_hand(dtype: torch.dtype, parts: int, steps: int) -> list[Any]:
    """Each rank's rows in half precision, gradients added up in float32, SGD with momentum on the master weights.

    A rank's share of a mean over all tokens: its own sum over the count of all.
    """
    master = make()
    half = copy.deepcopy(master).to(dtype)
    optimizer = torch.optim.SGD(master.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for step in range(steps):
        batch = batch_of(seed=step)
        count = (batch["labels"] != -100).sum()
        with torch.no_grad():
            for low, high in zip(half.parameters(), master.parameters(), strict=True):
                low.copy_(high)
        optimizer.zero_grad()
        for ids, labels in zip(batch["ids"].chunk(parts), batch["labels"].chunk(parts), strict=True):
            half.zero_grad()
            logits = half(ids).reshape(-1, 13)
            loss = nn.functional.cross_entropy(logits, labels.reshape(-1), reduction="sum") / count
            loss.backward()
            for low, high in zip(half.parameters(), master.parameters(), strict=True):
                if low.grad is not None:
                    gradient = low.grad.float()
                    high.grad = gradient if high.grad is None else high.grad + gradient
        seen.append({n: full(p.grad) for n, p in master.named_parameters()})
        optimizer.step()
        seen.append({n: full(p) for n, p in master.named_parameters()})
    return seen


class ReadsDtype(Language):
    """Reads the dtype of its parameters while it runs."""

    seen: Sequence[torch.dtype] = ()

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        self.seen = (self.embed.weight.dtype, next(self.parameters()).dtype)
        return super().forward(ids, labels)


def in_parallel(rank: int, world_size: int, name: str, changes: dict[str, Any]) -> Any:
    model = make()
    model.__class__ = ReadsDtype
    parallelize(model, plan_of(precision={"parameters": name}, **changes))
    assert model.embed.weight.dtype == torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        with communication() as log:
            loss = model(**batch_of(seed=step))
            assert loss.dtype == HALF[name]
            loss.backward()
        assert model.seen == (HALF[name],) * 2 and model.embed.weight.dtype == torch.float32
        seen.append({n: full(p.grad) for n, p in model.named_parameters()})
        optimizer.step()
        seen.append({n: full(p) for n, p in model.named_parameters()})
    assert all(
        p.to_local().dtype == torch.float32 for p in model.state_dict().values() if isinstance(p, DTensor)
    )
    gathers = sum(e.nbytes for e in log.events if e.kind == "all_gather" and e.function == "zero")
    sums = sum(e.nbytes for e in log.events if e.kind == "reduce_scatter")
    return seen, gathers, sums


def worst(actual: list[Any], expected: list[Any]) -> float:
    """Largest difference of any tensor relative to its own largest value."""
    differences = [0.0]
    for got, want in zip(actual, expected, strict=True):
        for name, value in want.items():
            assert (got[name] is None) == (value is None), name
            if value is not None:
                assert got[name].dtype == value.dtype == torch.float32, name
                scale = float(value.abs().max()) or 1.0
                differences.append(float((got[name] - value).abs().max()) / scale)
    return max(differences)


PLANS: list[tuple[int, dict[str, Any]]] = [
    (1, {"degrees": {"dp": 1}}),
    (2, {"degrees": {"dp": 2}}),
    (2, {"degrees": {"zero": 2}, "zero": {"stage": 2}}),
    (4, {"degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 3}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("world_size", "changes"), PLANS)
def test_bf16_equals_a_manual_loop(rank_pool: RankPool, world_size: int, changes: dict[str, Any]) -> None:
    # cross-entropy of a sum over the count of all ranks is what a rank computes; one rounding of bf16 is 4e-3
    expected = by_hand(torch.bfloat16, world_size, 3)
    exact = by_hand(torch.float32, 1, 3)
    for actual, gathers, sums in rank_pool.run(world_size, in_parallel, "bf16", changes):
        assert worst(actual, expected) < 2e-2
        assert worst(actual, exact) > 1e-4  # it is half precision: float32 would be nearer
        if "zero" in changes:
            assert 0 < gathers < sums * 1.3  # bf16 there (for stage 3 twice), float32 back


def test_bf16_on_one_rank_is_bit_equal(rank_pool: RankPool) -> None:
    ((actual, _, _),) = rank_pool.run(1, mean_on_one_rank)
    assert actual == 0.0


def mean_on_one_rank(rank: int, world_size: int) -> Any:
    master = make()
    half = copy.deepcopy(master).to(torch.bfloat16)
    half(**batch_of()).backward()
    model = parallelize(make(), plan_of(degrees={"dp": 1}, precision={"parameters": "bf16"}))
    model(**batch_of()).backward()
    differences = [
        float((full(p.grad) - q.grad.float()).abs().max())
        for p, q in zip(model.parameters(), half.parameters(), strict=True)
        if q.grad is not None
    ]
    return max(differences), 0, 0


def scaled(rank: int, world_size: int, changes: dict[str, Any]) -> Any:
    model = parallelize(make(), plan_of(precision={"parameters": "fp16"}, **changes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = GradScaler(init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(**batch_of(seed=step))).backward()
        if step == 1 and rank == world_size - 1:  # one rank's part alone overflows
            part = next(p.grad.to_local() for p in model.parameters() if p.grad is not None)
            part.view(-1)[0] = math.inf
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1e9)
        before = full(model.blocks[0].up.weight)
        scaler.step(optimizer)
        scaler.update()
        moved = not torch.equal(before, full(model.blocks[0].up.weight))
        seen.append((moved, scaler.get_scale(), float(norm)))
    return seen


@pytest.mark.slow
def test_all_ranks_skip_the_same_step(rank_pool: RankPool) -> None:
    plans = [{"degrees": {"dp": 2}}, {"degrees": {"zero": 2}, "zero": {"stage": 2}}]
    for changes in plans:
        single, two = rank_pool.run(2, scaled, changes)
        for mine, other in zip(single, two, strict=True):
            assert mine[:2] == other[:2]
        assert [moved for moved, _, _ in single] == [True, False, True, True]
        assert [scale for _, scale, _ in single] == [1024.0, 512.0, 512.0, 1024.0]
        exact = by_hand(torch.float32, 1, 1)[0]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in exact.values() if g is not None))
        assert abs(single[0][2] - norm) < 5e-3 * norm


def refused(rank: int, world_size: int) -> None:
    with pytest.raises(PlanError, match="float32 master weights"):
        parallelize(make(dtype=torch.float64), plan_of(degrees={"dp": 1}, precision={"parameters": "bf16"}))


def test_bf16_model_with_precision_is_refused(rank_pool: RankPool) -> None:
    rank_pool.run(1, refused)
