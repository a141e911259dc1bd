"""Optimizers of other packages, and float8 training, have the numbers of one device and go on in another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

from .optimizer_script import TOLERANCES, Net, batches, make, on_rank, one_device
from .plans import PLANS, gap

pytestmark = pytest.mark.filterwarnings("ignore")

# plan, and the plan of the run that goes on from its checkpoint
CASES = {
    "torchao.AdamW8bit": ("zero3", "pp2"),
    "torchao.AdamW4bit": ("pp2", "tp2"),
    "torchao.float8": ("tp2", "zero3"),
    "bitsandbytes.AdamW8bit": ("tp2", "zero3"),
    "schedulefree.AdamWScheduleFree": ("pp2", "zero3"),
}


@pytest.mark.parametrize("name", CASES)
def test_optimizers_have_the_numbers_of_one_device(rank_pool: RankPool, tmp_path: Path, name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    plan, later = CASES[name]
    exact = one_device(name, tmp_path)
    runs = rank_pool.run(2, on_rank, plan, name, tmp_path / plan)
    resumed = rank_pool.run(2, on_rank, later, name, tmp_path / later, tmp_path / plan)
    assert len(resumed[0]["losses"]) == 4
    for result in (*runs, *resumed):
        for key, numbers in result.items():
            assert gap(numbers, exact[key][-len(numbers) :]) < TOLERANCES[name], key


def stepped(rank: int, size: int, folder: Path) -> list[str]:
    """Types of this rank's part of a state: after a step, after a load, and after the next step."""
    net = mw.auto_parallelize(Net(), batches(1)[0], **PLANS["tp2"])
    optimizer = make("torchao.AdamW8bit", net.parameters())
    types = []

    def step() -> None:
        net(**batches(1)[0]).backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()

    def note() -> None:
        state = optimizer.state[net.layers[0][1].weight]["exp_avg"]
        types.append(type(state.to_local()).__name__)

    step()
    note()
    mw.save(folder / "state", model=net, optimizer=optimizer).wait()
    mw.load(folder / "state", model=net, optimizer=optimizer)
    note()
    step()
    note()
    return types


def test_states_are_quantized_again_after_a_load(rank_pool: RankPool, tmp_path: Path) -> None:
    pytest.importorskip("torchao")
    for types in rank_pool.run(2, stepped, tmp_path):
        assert types == ["OptimState8bit", "Tensor", "OptimState8bit"]
