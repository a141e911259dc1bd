"""Checkpoints of parameters and states on a GPU: written in the background, loaded under another plan, training goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .training_cases import PLANS, generators, precise


def losses(rank: int, size: int, pins: dict[str, Any], device: str, path: str, saves: bool) -> list[float]:
    """Of two steps after the checkpoint at `path`, which is written, or loaded into other values."""
    precise(device)
    mw.init(device)
    torch.manual_seed(0 if saves else 1)
    batch = {key: value.to(device) for key, value in CASES["gpt2"].batch().items()}
    model: Any = CASES["gpt2"].model().to(device)
    model = mw.parallelize(model, plan_once(model, batch, cluster="laptop-cpu", **pins), batch=batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)

    def step() -> float:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    if saves:
        step()
        handle = mw.save(path, model=model, optimizer=optimizer)
        result = [step(), step()]
        handle.wait()
        return result
    mw.load(path, model=model, optimizer=optimizer)
    assert all(p.device.type == device for p in model.parameters())
    assert generators().numel()
    return [step(), step()]


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tp2", "zero3"),
        *(pytest.param(*pair, marks=pytest.mark.gpu) for pair in [("zero3", "tp2"), ("dp2", "tp2-dp2")]),
    ],
)
def test_training_goes_on_under_another_plan(
    device_ranks: RankPool, device: str, source: str, target: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    size, pins = PLANS[source]
    (expected, *_) = device_ranks.run(size, losses, pins, device, path, True)
    size, pins = PLANS[target]
    # dropout goes on too: the states of the generators are in the checkpoint
    for seen in device_ranks.run(size, losses, pins, device, path, False):
        assert seen == pytest.approx(expected, rel=1e-5)
