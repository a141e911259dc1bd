"""The plan chooses what shards along zero leave whole, by the optimizer; runs save under one choice and go on under another."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = 2


class Block(nn.Module):
    """Matrices of unequal cost, and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 130), nn.Linear(130, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(self.up(y).relu()) * self.gate(y)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, 64)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(64, 128, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batch(rows: int = 12) -> dict[str, Tensor]:
    ids = torch.randint(128, (rows, 8), generator=torch.Generator().manual_seed(5))
    return {"ids": ids, "labels": ids.roll(1, 1)}


def planned(**options: Any) -> ParallelPlan:
    options = {"world_size": 4, "dp": 4, "zero": 2, "cluster": "laptop-cpu", **options}
    return mw.plan(Net(), batch(), **options)


def test_an_optimizer_of_whole_matrices_gets_owners_balanced_by_cost() -> None:
    plan = planned(optimizer="muon")
    assert plan.zero is not None and plan.zero.unit is None
    owners = plan.zero.owners
    # no embedding, no head, no vectors
    assert set(owners) == {f"layers.{i}.{n}.weight" for i in range(3) for n in ("gate", "up", "down")}
    costs = {name: float(64 * 64 * (64 if "gate" in name else 130)) for name in owners}
    loads = [sum(c for name, c in costs.items() if owners[name] == rank) for rank in range(4)]
    # six of 130 and three of 64 on four ranks: none can have less than two of 130
    assert max(loads) == 64 * 64 * 260 and len(loads) - loads.count(0) == 4
    assert any(
        "muon computes with whole matrices: each of 9 parameters" in note for note in plan.provenance.notes
    )
    assert "9 parameters whole on one rank each" in plan.explain()
    assert ParallelPlan.from_json(plan.to_json()) == plan
    # replans know it
    assert plan.provenance.request["optimizer"] == "muon"
    by_class = planned(optimizer=functools.partial(torch.optim.Muon, lr=0.1))
    assert by_class.zero == plan.zero


def test_the_unit_follows_the_optimizer_unless_the_request_says_one() -> None:
    assert planned().zero == planned(optimizer=torch.optim.AdamW).zero
    assert planned().zero.unit is None and not planned().zero.owners
    assert planned(optimizer="adamw8bit").zero.unit == 256
    assert planned(optimizer="adamw4bit").zero.unit == 128
    kept = planned(optimizer="muon", zero_unit=64)
    assert kept.zero.unit == 64 and not kept.zero.owners
    assert any("zero_unit=64 of the request is kept" in note for note in kept.provenance.notes)
    whole = planned(zero_unit="tensor")
    assert {"embed.weight", "layers.0.up.weight"} <= set(whole.zero.owners) and whole.zero.unit == "tensor"
    assert sorted(set(whole.zero.owners.values())) == [0, 1, 2, 3]
    assert planned(optimizer="muon", zero=0).zero is None


class Experts(nn.ModuleList):
    """Four experts, with biases that are large enough to have an owner."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 4096), nn.ReLU(), nn.Linear(4096, 16)) for _ in range(4))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            row, slot = torch.where(chosen == expert)
            out.index_add_(0, row, self[expert](x[row]) * weights[row, slot, None])
        return out


class Mixture(nn.Module):
    """Each row goes to its two best experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(16, 4), Experts()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.gate(flat).softmax(-1).topk(2, -1)
        return self.experts(flat, chosen, weights).view_as(x)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mixture = nn.Embedding(128, 16), Mixture()
        self.head = nn.Linear(16, 512, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.mixture(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


EXPERTS: dict[str, Any] = {"dp": 2, "ep": 2, "zero": 2, "zero_unit": "tensor", "cluster": "laptop-cpu"}


def test_experts_have_owners_where_their_own_rank_leaves_a_dim() -> None:
    """A container's child is on one rank of ep, dim 0 of all its parameters: of a vector nothing is left to zero."""
    plan = mw.plan(Mixed(), batch(16), world_size=4, **EXPERTS)
    assert plan.experts[0].kind == "container" and plan.zero is not None
    experts = {n for n in plan.zero.owners if n.startswith("mixture.experts.")}
    assert experts == {f"mixture.experts.{i}.{n}.weight" for i in range(4) for n in (0, 2)}
    # of one data group the biases can have owners
    alone = mw.plan(Mixed(), batch(16), world_size=4, **{**EXPERTS, "ep": 1, "dp": 4})
    assert {f"mixture.experts.{i}.0.bias" for i in range(4)} <= set(alone.zero.owners)


def stepped_experts(rank: int, size: int, options: dict[str, Any] | None) -> tuple[dict[str, Tensor], int]:
    torch.manual_seed(0)
    net: Any = Mixed().double()
    if options is not None:
        net = mw.auto_parallelize(net, batch(16), **options)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)]
    train(net, optimizers, 16)
    owners = 0 if options is None else len(net.parallel_plan.zero.owners)
    return values(net, optimizers), owners


def test_experts_with_owners_step_as_on_one_device(rank_pool: RankPool) -> None:
    ((exact, _),) = rank_pool.run(1, stepped_experts, None)
    for run, owners in rank_pool.run(4, stepped_experts, EXPERTS):
        assert owners > 8
        assert apart(run, exact) < 1e-10


def test_owners_that_do_not_fit_the_memory_are_not_chosen() -> None:
    plan = planned(optimizer="muon")
    tight = planned(
        optimizer="muon", memory_limit=int(plan.predicted.memory_bytes["total"] * 1.0301) + 1, zero=2
    )
    assert not tight.zero.owners
    assert any("matrices are shared in chunks" in note for note in tight.provenance.notes)


@pytest.mark.parametrize(
    ("optimizer", "wrong"),
    [
        ("moun", "optimizer='moun' is unknown.*did you mean 'muon'"),
        (torch.optim.LBFGS, "optimizer=LBFGS of torch.optim.lbfgs is not known"),
        (torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1), "optimizer is a SGD object.*give its class"),
    ],
)
def test_optimizers_that_cannot_be_planned_for_are_refused(optimizer: Any, wrong: str) -> None:
    with pytest.raises(mw.errors.UsageError, match=wrong):
        planned(optimizer=optimizer)


def built(options: dict[str, Any] | None) -> tuple[Any, list[torch.optim.Optimizer]]:
    """In double precision, so that gradients round to the same bfloat16 numbers in every layout."""
    torch.manual_seed(0)
    net: Any = Net().double()
    if options is not None:
        net = mw.auto_parallelize(net, batch(), cluster="laptop-cpu", **options)
    matrices = [p for n, p in net.named_parameters() if "layers" in n and p.ndim == 2]
    rest = [p for n, p in net.named_parameters() if "layers" not in n or p.ndim != 2]
    return net, [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


def train(net: Any, optimizers: list[torch.optim.Optimizer], rows: int = 12) -> None:
    for _ in range(STEPS):
        net(**batch(rows)).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def values(net: Any, optimizers: list[torch.optim.Optimizer]) -> dict[str, Tensor]:
    whole = {}
    for name, p in net.named_parameters():
        states = [x for o in optimizers for x in o.state.get(p, {}).items()]
        for key, x in {"": p, **dict(states)}.items():
            whole[f"{name}/{key}"] = (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()
    return whole


def saved(rank: int, size: int, options: dict[str, Any] | None, folder: Path) -> dict[str, Tensor]:
    net, optimizers = built(options)
    train(net, optimizers)
    mw.save(folder, model=net, optimizer=optimizers, asynchronous=False)
    return values(net, optimizers)


def resumed(rank: int, size: int, options: dict[str, Any] | None, folder: Path) -> Any:
    net, optimizers = built(options)
    mw.load(folder, model=net, optimizer=optimizers)
    loaded = values(net, optimizers)
    owners = None if options is None else len(net.parallel_plan.zero.owners)
    train(net, optimizers)
    return loaded, values(net, optimizers), owners


def apart(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - x).abs().max()) for name, x in b.items())


def test_a_run_goes_on_under_another_unit_and_world_size(rank_pool: RankPool, tmp_path: Path) -> None:
    """Owners on four ranks (tp 2), to blocks on three, to owners on two: those of one device."""
    exact = rank_pool.run(1, saved, None, tmp_path / "one")[0]
    later = rank_pool.run(1, resumed, None, tmp_path / "one")[0][1]
    four = {"dp": 2, "tp": 2, "zero": 2, "optimizer": "muon"}
    for run in rank_pool.run(4, saved, four, tmp_path / "four"):
        assert apart(run, exact) < 1e-10
    for ranks, options, owners in (
        (3, {"dp": 3, "zero": 3, "zero_unit": 64}, 0),
        (2, {"dp": 2, "zero": 3, "optimizer": "muon"}, 9),
    ):
        for loaded, stepped, chosen in rank_pool.run(ranks, resumed, options, tmp_path / "four"):
            assert chosen == owners
            assert apart(loaded, exact) < 1e-10
            assert apart(stepped, later) < 1e-9
