"""Muon, and an optimizer that needs whole matrices, in a run that changes its layout: on disk, in memory, and with stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"zero": 3, "dp": 2},
    "tp2": {"tp": 2, "dp": 1},
    "pp2": {"pp": 2},
    "tp2-zero2": {"tp": 2, "zero": 2, "dp": 2},
    "pp2-zero1": {"pp": 2, "zero": 1, "dp": 2},
}
STEPS = 3


class Net(nn.Module):
    """An embedding, and matrices that no axis of two ranks divides in both dims."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 130, bias=False), nn.GELU(), nn.Linear(130, 64))
            for _ in range(2)
        )
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Whitening(torch.optim.Optimizer):
    """The gradient times a root of the mean of its products, as one side of Shampoo."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["factor"], state["momentum_buffer"] = (
                        p.new_zeros(len(p), len(p)),
                        torch.zeros_like(p),
                    )
                state["factor"].lerp_(p.grad @ p.grad.T, 0.5)
                values, vectors = torch.linalg.eigh(state["factor"])
                root = (vectors * (values.clamp(min=0) + 1e-6) ** -0.25) @ vectors.T
                state["momentum_buffer"].lerp_(root @ p.grad, 0.5)
                p.sub_(state["momentum_buffer"], alpha=group["lr"])


def batch() -> dict[str, Tensor]:
    ids = torch.randint(128, (4, 8), generator=torch.Generator().manual_seed(5))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def built(plan: str | None, whitened: bool = False) -> tuple[Any, Any]:
    """In double precision, so that gradients round to the same bfloat16 numbers in every layout."""
    torch.manual_seed(0)
    net: Any = Net().double()
    if plan is not None:
        net = mw.auto_parallelize(net, batch(), cluster="laptop-cpu", **PLANS[plan])
    matrices = [p for n, p in net.named_parameters() if "layers" in n and p.ndim == 2]
    if whitened:
        return net, mw.step_whole_matrices(Whitening(matrices, lr=0.02))
    return net, torch.optim.Muon(matrices, lr=0.02)


def train(net: Any, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        net(**batch()).backward()
        optimizer.step()
        net.zero_grad()


def state(net: Any, optimizer: Any) -> dict[str, Tensor]:
    """The whole parameters and momenta; before the first step after a load, a stage shows its own momenta only."""

    def whole(x: Any) -> Tensor:
        return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()

    values = {name: whole(p) for name, p in net.named_parameters()}
    stepped = type(optimizer.state).__name__ == "_StageStates" or not hasattr(net.embed.weight, "holders")
    for name, p in net.named_parameters():
        if stepped and p in optimizer.state:
            values[f"{name}/momentum"] = whole(optimizer.state[p]["momentum_buffer"])
            if "factor" in optimizer.state[p]:
                values[f"{name}/factor"] = whole(optimizer.state[p]["factor"])
    return values


def exact(whitened: bool = False) -> list[dict[str, Tensor]]:
    """After each step on one device."""
    net, optimizer = built(None, whitened)
    states = []
    for _ in range(2 * STEPS):
        train(net, optimizer, 1)
        states.append(state(net, optimizer))
    return states


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys() and len(a) in (16, 20), a.keys()
    return max(float((a[name] - x).abs().max() / x.abs().max()) for name, x in b.items())


def saved(rank: int, size: int, plan: str, path: str, whitened: bool = False) -> Any:
    net, optimizer = built(plan, whitened)
    train(net, optimizer, STEPS)
    mw.save(path, model=net, optimizer=optimizer, asynchronous=False)
    return state(net, optimizer)


def resumed(rank: int, size: int, plan: str, path: str, whitened: bool = False) -> Any:
    net, optimizer = built(plan, whitened)
    mw.load(path, model=net, optimizer=optimizer)
    loaded = state(net, optimizer)
    train(net, optimizer, STEPS)
    return loaded, state(net, optimizer)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "later"), [("zero3", "tp2-zero2"), ("tp2-zero2", "pp2"), ("pp2-zero1", "zero3")]
)
def test_a_checkpoint_goes_on_in_another_layout(
    rank_pool: RankPool, tmp_path: Path, plan: str, later: str
) -> None:
    sizes = {name: 4 if "-" in name else 2 for name in PLANS}
    states = exact()
    for before in rank_pool.run(sizes[plan], saved, plan, str(tmp_path / plan)):
        assert apart(before, states[STEPS - 1]) < 1e-10
    for loaded, after in rank_pool.run(sizes[later], resumed, later, str(tmp_path / plan)):
        assert all(torch.equal(x, before[name]) for name, x in loaded.items())
        assert apart(after, states[-1]) < 1e-10


def resharded(rank: int, size: int) -> Any:
    net, optimizer = built("zero3")
    train(net, optimizer, STEPS)
    before = state(net, optimizer)
    plan = mw.plan(Net().double(), batch(), world_size=size, cluster="laptop-cpu", **PLANS["tp2"])
    mw.reshard(net, optimizer, plan)
    after = state(net, optimizer)
    train(net, optimizer, STEPS)
    return all(torch.equal(after[name], x) for name, x in before.items()), state(net, optimizer)


@pytest.mark.slow
def test_a_run_is_resharded(rank_pool: RankPool) -> None:
    states = exact()
    for same, after in rank_pool.run(2, resharded):
        assert same
        assert apart(after, states[-1]) < 1e-10


@pytest.mark.slow
def test_states_of_whole_matrices_go_on_in_another_layout(rank_pool: RankPool, tmp_path: Path) -> None:
    states, path = exact(whitened=True), str(tmp_path / "run")
    for before in rank_pool.run(2, saved, "zero3", path, True):
        assert apart(before, states[STEPS - 1]) < 1e-8
    for loaded, after in rank_pool.run(4, resumed, "tp2-zero2", path, True):
        assert all(torch.equal(x, before[name]) for name, x in loaded.items())
        assert apart(after, states[-1]) < 1e-8


def _refused(rank: int, size: int) -> None:
    net, optimizer = built("pp2", whitened=True)
    net(**batch()).backward()
    with pytest.raises(mw.errors.UnsupportedError, match=r"step_whole_matrices\(Whitening\) under pp"):
        optimizer.step()


@pytest.mark.slow
def test_whole_matrices_with_stages_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, _refused)
