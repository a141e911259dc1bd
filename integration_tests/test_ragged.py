"""Shards at borders of blocks: checkpoints, live reshards and whole state dicts, with states that are quantized in blocks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

BLOCK, STEPS = 64, 2
RAGGED: dict[str, Any] = {"zero": {"stage": 3, "unit": BLOCK}}
CHUNKS: dict[str, Any] = {"zero": {"stage": 2}}


class BlockMomentum(torch.optim.Optimizer):
    """Momentum as int8 codes, with a scale for each block."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, count = self.state[p], -(-p.numel() // BLOCK)
                if not state:
                    state.update(codes=torch.zeros(p.shape, dtype=torch.int8), scale=torch.zeros(count))
                pad = count * BLOCK - p.numel()
                codes, grad = (
                    nn.functional.pad(x.flatten().float(), (0, pad)).view(-1, BLOCK)
                    for x in (state["codes"], p.grad)
                )
                momentum = codes * state["scale"][:, None] + grad
                state["scale"].copy_(momentum.abs().amax(1) / 127 if count else state["scale"])
                codes = (momentum / state["scale"].clamp(min=1e-12)[:, None]).round()
                state["codes"].copy_(codes.flatten()[: p.numel()].view(p.shape))
                p.add_(
                    (codes * state["scale"][:, None]).flatten()[: p.numel()].view(p.shape), alpha=-group["lr"]
                )


def make(plan: dict[str, Any] | None, size: int) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(100, 65), nn.ReLU(), nn.Linear(65, 129))
    if plan is not None:
        mw.parallelize(model, ParallelPlan(world_size=size, degrees={"zero": size}, **plan))
    return model, mw.step_whole_blocks(BlockMomentum(model.parameters(), {"lr": 0.01}), BLOCK, ["scale"])


def steps(model: Any, optimizer: Any, first: int) -> None:
    """Two steps with the same gradients in every layout."""
    for step in range(first, first + STEPS):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()


def values(model: Any, optimizer: Any) -> dict[str, Tensor]:
    whole = {}
    for name, p in model.named_parameters():
        for key, x in {"": p, **optimizer.state.get(p, {})}.items():
            whole[f"{name}/{key}"] = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
    return whole


def saved(rank: int, size: int, plan: dict[str, Any] | None, folder: Path) -> dict[str, Tensor]:
    model, optimizer = make(plan, size)
    steps(model, optimizer, 0)
    mw.save(folder, model=model, optimizer=optimizer).wait()
    return values(model, optimizer)


def resumed(rank: int, size: int, plan: dict[str, Any], folder: Path, then: Path) -> Any:
    """Values after a load into new tensors, after two more steps and a load into those of an earlier run."""
    model, optimizer = make(plan, size)
    mw.load(folder, model=model, optimizer=optimizer)
    loaded = values(model, optimizer)
    steps(model, optimizer, STEPS)
    mw.save(then, model=model, optimizer=optimizer).wait()
    later = values(model, optimizer)
    mw.load(folder, model=model, optimizer=optimizer)
    whole = mw.full_state_dict(model)
    return loaded, later, values(model, optimizer), whole


def planned(rank: int, size: int) -> list[int]:
    """Rows of the first matrix on each rank, of a plan that was made with the unit."""
    model: Any = nn.Sequential(nn.Linear(100, 65), nn.ReLU(), nn.Linear(65, 129))
    mw.auto_parallelize(model, torch.zeros(4, 100), dp=size, zero=2, zero_unit=256)
    return [len(model[0].weight.detach().to_local())]


def moved(rank: int, size: int) -> Any:
    """Values before and after a reshard in memory, to even chunks and back, and after two more steps."""
    model, optimizer = make(RAGGED, size)
    steps(model, optimizer, 0)
    before = values(model, optimizer)
    for plan in (CHUNKS, RAGGED):
        mw.reshard(model, optimizer, ParallelPlan(world_size=size, degrees={"zero": size}, **plan))
    after = values(model, optimizer)
    steps(model, optimizer, STEPS)
    return before, after, values(model, optimizer)


def same(values: dict[str, Tensor], exact: dict[str, Tensor]) -> bool:
    return values.keys() == exact.keys() and all(torch.equal(x, exact[key]) for key, x in values.items())


def test_any_layout_loads_them(rank_pool: RankPool, tmp_path: Path) -> None:
    """Two ranks ragged, to chunks on three, to ragged on two, and to one device: bit for bit those of one device."""
    start = rank_pool.run(1, saved, None, tmp_path / "one")[0]
    assert all(same(run, start) for run in rank_pool.run(2, saved, RAGGED, tmp_path / "two"))
    exact, later, *_ = rank_pool.run(1, resumed, {}, tmp_path / "one", tmp_path / "later")[0]
    assert same(exact, start)
    assert not same(later, start)
    chain = ((3, CHUNKS, "two"), (2, RAGGED, "one"), (3, RAGGED, "two"))
    for place, (ranks, plan, source) in enumerate(chain):
        runs = rank_pool.run(ranks, resumed, plan, tmp_path / source, tmp_path / f"after-{place}")
        for loaded, stepped, again, whole in runs:
            assert same(loaded, start)
            assert same(stepped, later)
            assert same(again, start)
            assert all(torch.equal(x, start[f"{name}/"]) for name, x in whole.items())


def test_a_plan_is_made_with_a_unit(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, planned) == [[64], [1]]


def test_a_live_model_is_resharded(rank_pool: RankPool, tmp_path: Path) -> None:
    start = rank_pool.run(1, saved, None, tmp_path / "one")[0]
    later = rank_pool.run(1, resumed, {}, tmp_path / "one", tmp_path / "later")[0][1]
    for before, after, stepped in rank_pool.run(2, moved):
        assert same(before, start)
        assert same(after, start)
        assert same(stepped, later)
