"""Tapes of other numbers of rows: scaled where sizes grow as the rows do, recorded where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from counting import counted
from planner_models import LAPTOP_CPU, Transformer, eager, tokens
from torch import nn

from meshwright_dtensor.planning import PlanRequest
from meshwright_planner.profile import tapes


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
def test_all_pairs_of_rows_grow_with_their_square(flat: bool) -> None:
    model, batch = Contrastive(flat), pairs(512)
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.05)


def test_a_third_tape_is_recorded_only_where_two_do_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """And every one where it says otherwise than they do."""
    assert recorded(Transformer(), tokens(rows=64), monkeypatch) == [2, 4]
    assert recorded(Contrastive(), pairs(64), monkeypatch) == [2, 4, 8]
    found = recorded(Contrastive(flat=True), pairs(64), monkeypatch)
    assert found[:3] == [2, 4, 8] and {32, 64} <= set(found)
    assert {6, 3} <= set(recorded(Contrastive(flat=True), pairs(6), monkeypatch))


def test_models_that_take_no_few_rows_are_recorded_as_they_are() -> None:
    model, batch = Hard(), {"x": torch.randn(64, 32)}
    plan = eager().plan(model, batch, PlanRequest(cluster=LAPTOP_CPU, world_size=1))[0]
    assert plan.predicted is not None
    assert plan.predicted.total_bytes == pytest.approx(counted(model, batch), rel=0.05)
