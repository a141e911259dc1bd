"""Peaks of the forward pass against counted bytes of tensors."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from counting import counted
from planner_models import LAPTOP_CPU, Transformer, eager, tokens
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.memory.liveness import live_ranges
from meshwright_planner.memory.module_work import module_work
from meshwright_planner.memory.peak import Replay
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record


class Frozen(nn.Module):
    """A wide part that no gradient comes to."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.wide = nn.Linear(32, 32, bias=False), nn.Linear(32, 1024)
        self.wide.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = F.gelu(self.wide(x)).mean(1, keepdim=True)
        return (self.own(x) * gate).relu().mean()


class Joined(nn.Module):
    """Many pieces, held until they are joined."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.own(x)
        return torch.cat([y + float(n) for n in range(16)], 1).sum(1).relu().mean()


class InPlace(nn.Module):
    """What is written over is no more than it was."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            gate = x.repeat(1, 32).mul_(2.0).add_(1.0).relu_().mean(1, keepdim=True)
        return (self.own(x) * gate).relu().mean()


def of_one(model: nn.Module, batch: dict[str, torch.Tensor]) -> PlacementProblem:
    book = RuleBook.first_party()
    tape = record(model, Batch.of(batch), book.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, 1), 1)
    return PlacementProblem(Legality(tape, quotient(tape), book, costs))


@pytest.mark.parametrize("kind", [Frozen, Joined, InPlace])
def test_peak_may_be_in_the_forward_pass(kind: type[nn.Module]) -> None:
    model, batch = kind(), {"x": torch.randn(2048, 32)}
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.05)


def test_module_work_has_temporaries_of_the_forward_pass() -> None:
    problem = of_one(Frozen(), {"x": torch.randn(2048, 32)})
    work = module_work(Replay(problem, problem.replicated()))
    assert max(part.transient_bytes for part in work) >= 2 * 2048 * 1024 * 4


def test_saved_tensors_are_not_counted_as_live() -> None:
    """A value counts until it is kept; views of it and what lasts are nothing new."""
    problem = of_one(Transformer(layers=4), tokens(rows=8))
    replay = Replay(problem, problem.replicated())
    logits = 8 * 32 * 512 * 4
    assert max(replay.forward_alive) <= logits + 3 * 8 * 32 * 64 * 4
    tape, quotient_ = problem.tape, problem.quotient
    spans = {(k, slot): (begin, end) for k, slot, begin, end in live_ranges(problem)}
    for item in tape.saved:
        if item.output and item.value is not None and quotient_.node(item.node) == item.node:
            slot = [ref.i for ref in tape.nodes[item.node].outs].index(item.value)
            assert (item.node, slot) not in spans
