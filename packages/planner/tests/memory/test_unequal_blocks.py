"""Predicted memory of unequal recomputed modules against counted bytes of tensors."""

from __future__ import annotations

import pytest
import torch
from counting import counted
from planner_models import LAPTOP_CPU, Transformer, eager, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.memory.module_work import module_work
from meshwright_planner.memory.peak import Replay
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.recompute.effect import recomputed
from meshwright_planner.recompute.rules import recompute_rules
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record


class Part(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class Unequal(nn.Module):
    """Twelve blocks, one of them large."""

    def __init__(self, large: int, again: bool = False) -> None:
        super().__init__()
        self.again = again
        self.layers = nn.ModuleList(Part(32, 1024 if n == large else 32) for n in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.square().mean()


def of_one(model: nn.Module, batch: dict[str, torch.Tensor]) -> PlacementProblem:
    book = RuleBook.first_party()
    tape = record(model, Batch.of(batch), book.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, 1), 1)
    return PlacementProblem(Legality(tape, quotient(tape), book, costs))


@pytest.mark.parametrize("large", [0, 5, 11, -1])
def test_largest_recomputed_block_is_alive(large: int) -> None:
    """Not the mean of all blocks: the small ones have fewer live bytes."""
    model, batch = Unequal(large), {"x": torch.randn(1024, 32)}
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=1, recompute="full")
    plan = eager().plan(model, batch, request)[0]
    assert plan.predicted is not None
    model.again = True
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.06)


def test_module_work_has_live_bytes_of_each_block() -> None:
    model, batch = Unequal(5), {"x": torch.randn(1024, 32)}
    problem = of_one(model, batch)
    free = problem.replicated()
    other, placement, again = recomputed(problem, free, recompute_rules(model, "full"))
    more: dict[str, float] = {}
    pairs = zip(module_work(Replay(problem, free)), module_work(Replay(other, placement, again)), strict=True)
    for before, after in pairs:
        assert before.module == after.module
        block = ".".join(after.module.split(".")[:2])
        more[block] = max(more.get(block, 0.0), after.transient_bytes - before.transient_bytes)
    large, small = more["layers.5"], more["layers.4"]
    assert large >= 1024 * 1024 * 4 and 0 < small < 1024 * 32 * 4 * 4 and more[""] == 0


def test_inputs_of_recomputed_blocks_are_all_saved() -> None:
    """That of the first comes from the embedding, those of the others from a block: both are kept, as often as there are."""
    model = Transformer(layers=8)
    problem = of_one(model, tokens())
    other, placement, _ = recomputed(problem, problem.replicated(), recompute_rules(model, "full"))
    hidden = 2 * 32 * 64 * 4
    assert other.saved.total(placement) >= 8 * hidden
    assert other.saved.total(placement) == pytest.approx(sum(Replay(other, placement).kept))


class Gated(nn.Module):
    """Keeps much, and then computes something wide without gradients."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.layers = again, nn.ModuleList([Gate(), Part(32, 32)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.again else layer(x)
        return x.relu().mean()


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for _ in range(24):
            h = self.up(h).tanh()
        with torch.no_grad():
            gate = x.repeat(1, 24).add(1.0).mean(1, keepdim=True)
        return x + (self.up(h) * gate).relu()


def test_peak_may_be_in_the_forward_of_a_recomputed_block() -> None:
    """Its saved tensors add to the tensors that live in its forward only."""
    model, batch = Gated(again=False), {"x": torch.randn(1024, 32)}
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=1, recompute="layers.*")
    plan = eager().plan(model, batch, request)[0]
    assert plan.predicted is not None
    model.again = True
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.06)
