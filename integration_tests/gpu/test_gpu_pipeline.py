"""Pipelines whose messages do not fit into the buffers of NCCL: a send there waits for its receive, so orders matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from plan_once import plan_once
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .training_cases import precise

SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zero-bubble": 1, "zbv": 2, "dualpipev": 2}
"""Name -> stages of a rank."""


class Chain(nn.Module):
    """Blocks between which rows of `width` numbers pass."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            x = x + block(x)
        return {"loss": (x - target).square().mean()}


def steps(rank: int, size: int, schedule: str, device: str, rows: int, width: int) -> list[list[float]]:
    """Losses of two steps on one device, and in a pipeline."""
    precise(device)
    mw.init(device)
    torch.manual_seed(1)
    batch = {name: torch.randn(rows, width, device=device) for name in ("x", "target")}
    losses = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model: Any = Chain(width).to(device)
        if parallel:
            pins = {"pp": size, "microbatches": 4, "schedule": schedule}
            plan = plan_once(model, batch, cluster="laptop-cpu", **pins)
            model = mw.parallelize(model, plan, batch=batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        seen = []
        for _ in range(3):
            loss = model(**batch)["loss"]
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(float(loss.detach()))
        losses.append(seen)
    return losses


@pytest.mark.gpu
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_that_fill_all_buffers(sending_ranks: RankPool, device: str, schedule: str) -> None:
    # 32 MiB for a microbatch
    rows, width = (4 * 8192, 1024) if device == "cuda" else (64, 16)
    for expected, seen in sending_ranks.run(2, steps, schedule, device, rows, width, timeout=60):
        assert seen == pytest.approx(expected, rel=1e-5)
