"""A pipelined run is saved by all of its stages and goes on in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from plan_once import plan_once
from zoo import CASES

import meshwright as mw
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 2


def _train(model: Any, optimizer: torch.optim.Optimizer, start: int) -> list[float]:
    losses = []
    for step in range(start, start + STEPS):
        torch.manual_seed(step)
        loss = model(**CASES["gpt2"].batch()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _built(size: int, **pins: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = CASES["gpt2"].model()
    if pins:
        plan: Any = plan_once(model, CASES["gpt2"].batch(), cluster="laptop-cpu", **pins)
        mw.parallelize(model, plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def save_from_stages(rank: int, size: int, path: str) -> int:
    model, optimizer = _built(size, pp=2)
    _train(model, optimizer, 0)
    mw.save(path, model=model, optimizer=optimizer).wait()
    # as part of a module that is not divided itself
    holder = torch.nn.ModuleDict({"net": model})
    mw.save(f"{path}-part", model=holder, optimizer=optimizer).wait()
    whole = mw.full_state_dict(model, everywhere=True)
    for name, value in mw.full_state_dict(holder, everywhere=True).items():
        assert torch.equal(value, whole[name.removeprefix("net.")])
    assert stages_of(model) is not None
    return len(list(model.parameters()))


def go_on(rank: int, size: int, path: str, pins: dict[str, int]) -> list[float]:
    model, optimizer = _built(size, **pins)
    part = path.endswith("-part")
    mw.load(path, model=torch.nn.ModuleDict({"net": model}) if part else model, optimizer=optimizer)
    return _train(model, optimizer, STEPS)


def alone(rank: int, size: int) -> list[float]:
    model, optimizer = _built(size)
    _train(model, optimizer, 0)
    return _train(model, optimizer, STEPS)


@pytest.mark.slow
def test_stages_are_saved_and_loaded_in_any_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "step-2")
    held = rank_pool.run(2, save_from_stages, path)
    # those of the other stage are there, and have no memory
    assert all(count == len(list(CASES["gpt2"].model().parameters())) for count in held)
    (want,) = rank_pool.run(1, alone)
    for size, pins in ((1, {}), (2, {"pp": 2}), (2, {"dp": 1, "tp": 2})):
        losses_of_ranks = rank_pool.run(size, go_on, path, pins)
        if "pp" in pins:
            losses_of_ranks += rank_pool.run(size, go_on, f"{path}-part", pins)
        for losses in losses_of_ranks:
            assert max(abs(a - b) / a for a, b in zip(want, losses, strict=True)) < 1e-5
