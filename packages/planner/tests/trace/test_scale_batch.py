"""Tapes of other numbers of rows: scaled where sizes grow as the rows do, recorded where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import counted
from planner_models import HOST, LAPTOP_CPU, Transformer, eager, tokens
from torch import nn

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation import tapes
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import default_rules


class Contrastive(nn.Module):
    """Each row of one side against each of the other."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.left, self.right, self.flat = nn.Linear(32, 32), nn.Linear(32, 32), flat

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        logits = self.left(x) @ self.right(y).t()
        if self.flat:
            return logits.reshape(-1).relu().mean()
        return logits.relu().mean()


class Hard(nn.Module):
    """Takes 64 rows and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(x) * torch.ones(64, 1)).relu().mean()


def recorded(model: nn.Module, batch: dict[str, torch.Tensor], patch: pytest.MonkeyPatch) -> list[int]:
    """The rows of every tape that planning records."""
    rows: list[int] = []
    record = tapes.record

    def noted(model: nn.Module, batch: Any, *rest: Any) -> Any:
        rows.append(batch.size)
        return record(model, batch, *rest)

    patch.setattr(tapes, "record", noted)
    eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=2))
    patch.undo()
    return rows


def pairs(rows: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(rows, 32), "y": torch.randn(rows, 32)}


@pytest.mark.parametrize("flat", [False, True])
def test_pairs_of_rows_grow_quadratically(flat: bool) -> None:
    model, batch = Contrastive(flat), pairs(512)
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.05)


def test_third_tape_is_recorded_only_for_non_proportional_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every one where it says otherwise than they do."""
    assert recorded(Transformer(), tokens(rows=64), monkeypatch) == [2, 4]
    assert recorded(Contrastive(), pairs(64), monkeypatch) == [2, 4, 8]
    tapes = recorded(Contrastive(flat=True), pairs(64), monkeypatch)
    assert tapes[:3] == [2, 4, 8] and {32, 64} <= set(tapes)
    assert {6, 3} <= set(recorded(Contrastive(flat=True), pairs(6), monkeypatch))


def test_models_that_need_many_rows_are_recorded_at_their_size() -> None:
    model, batch = Hard(), {"x": torch.randn(64, 32)}
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.05)


def test_one_row_is_recorded_only_if_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is far out of the question by tapes of more rows is left at that."""
    rows: list[int] = []
    record = tapes.record
    monkeypatch.setattr(
        tapes, "record", lambda model, batch, *rest: rows.append(batch.size) or record(model, batch, *rest)
    )
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=4)
    search = Search(eager().setting(Transformer(), tokens(rows=4), request, HOST), default_rules())
    search.estimate(search.point({"dp": 2}))  # two rows each; what four say comes with it
    point = search.point({"dp": 4})
    far = search.estimate(point, 1e-9)
    assert 1 not in rows
    near = search.estimate(point, far.step_seconds)
    assert rows[-1] == 1 and len(rows) == 3
    assert near == search.estimate(point) == search.estimate(point, 1e-9)  # what is known is taken
    assert far.step_seconds == pytest.approx(near.step_seconds, rel=0.01)
