"""Optimizers of other packages, and float8 training, have the numbers of one device and go on in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
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


SHAPES = {"even": (128, 256), "small": (64, 64), "odd": (130, 256), "short": (256, 100), "columns": (33, 256)}
"""Matrices of which two ranks share rows, by whole blocks of 256 elements; of the last one they share columns."""


def states(
    rank: int, size: int, name: str, plan: ParallelPlan | None
) -> dict[str, list[tuple[Tensor, bool]]]:
    """The codes and scales of each state, and whether they are sharded, after two steps with the same gradients."""
    torch.manual_seed(0)
    net: Any = nn.ParameterDict({key: nn.Parameter(torch.randn(shape)) for key, shape in SHAPES.items()})
    if plan is not None:
        mw.parallelize(net, plan)
    optimizer = make(name, net.parameters())
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        for p in net.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
    parts = {}
    for key, p in net.items():
        for state, x in optimizer.state[p].items():
            if isinstance(x, Tensor) and x.dim():
                local = x.to_local() if hasattr(x, "to_local") else x
                of_blocks = [local.codes, local.scale] if hasattr(local, "codes") else [local]
                sharded = any(p.is_shard() for p in getattr(x, "placements", ()))
                parts[f"{key}/{state}"] = [(part.clone(), sharded) for part in of_blocks]
    return parts


@pytest.mark.parametrize("name", ["torchao.AdamW8bit", "bitsandbytes.AdamW8bit"])
def test_states_have_the_blocks_of_one_device(rank_pool: RankPool, name: str) -> None:
    pytest.importorskip(name.partition(".")[0])
    exact = rank_pool.run(1, states, name, None)[0]
    plan = ParallelPlan(world_size=2, degrees={"zero": 2}, zero={"stage": 3})
    first, second = rank_pool.run(2, states, name, plan)
    unequal = set()
    for key, wholes in exact.items():
        dim = 1 if "columns" in key else 0
        parts = [
            torch.cat([a, b], dim if a.dim() > 1 else 0) if sharded else a
            for (a, sharded), (b, _) in zip(first[key], second[key], strict=True)
        ]
        if len(parts) != len(wholes) or not all(
            torch.equal(a, b) for a, (b, _) in zip(parts, wholes, strict=True)
        ):
            unequal.add(key.partition("/")[0])
    # those of columns, too, which are gathered for the step
    assert unequal == set()
