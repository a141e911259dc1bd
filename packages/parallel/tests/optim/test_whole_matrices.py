"""Optimizers that need whole matrices: each parameter is stepped on one rank, with the numbers of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_muon import PLANS, WIDTH, Net, distances
from torch import Tensor, optim
from torch.distributed.tensor import Replicate, distribute_tensor

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize, step_whole_matrices

STEPS = 3


class Shampoo(optim.Optimizer):
    """Preconditioners of both dims of a matrix; momentum alone for vectors. Counts the matrices that are decomposed."""

    def __init__(self, params: Any, lr: float = 0.05, nested: bool = False) -> None:
        super().__init__(params, {"lr": lr})
        self.nested, self.decomposed, self.steps = nested, [], 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"], state["momentum"] = torch.tensor(0.0), torch.zeros_like(p)
                    factors = [1e-3 * torch.eye(n, dtype=p.dtype) for n in p.shape] if p.ndim == 2 else []
                    state.update(
                        {"factors": factors}
                        if self.nested
                        else dict(zip(("left", "right"), factors, strict=False))
                    )
                state["step"] += 1
                state["momentum"].lerp_(p.grad, 0.5)
                update = state["momentum"]
                if p.ndim == 2:
                    left, right = state["factors"] if self.nested else (state["left"], state["right"])
                    left += p.grad @ p.grad.T
                    right += p.grad.T @ p.grad
                    update = self.root(left) @ update @ self.root(right)
                p.add_(update, alpha=-group["lr"])

    def root(self, x: Tensor) -> Tensor:
        self.decomposed.append(len(x))
        values, vectors = torch.linalg.eigh(x)
        return (vectors * values.clamp(min=1e-12) ** -0.25) @ vectors.T


class TwoPasses(Shampoo):
    """Reads its groups before the step of Shampoo, so that they are iterated twice."""

    def step(self, closure: Any = None) -> None:
        assert all(len(group["params"]) >= 0 for group in self.param_groups)
        super().step()


def trained(plan: dict[str, Any] | None, size: int, nested: bool, marked: bool = True) -> Any:
    torch.manual_seed(0)
    model: Any = Net().double()
    if plan is not None:
        parallelize(model, ParallelPlan(world_size=size, **plan))
    optimizer: Any = (Derived if nested else Shampoo)([{"params": list(model.parameters())}], nested=nested)
    if plan is not None and marked:
        assert step_whole_matrices(optimizer) is optimizer
    for step in range(STEPS):
        generator = seeded(step)
        optimizer.zero_grad()
        model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)).backward()
        optimizer.step()
        if plan is not None and not nested:
            # whole values of one device, and back
            optimizer.load_state_dict(optimizer.state_dict())
    values = dict(model.named_parameters())
    for name, p in model.named_parameters():
        entries = optimizer.state.get(p, {})
        values.update({f"{name}/{key}": x for key, x in entries.items() if isinstance(x, Tensor)})
        values.update({f"{name}/factors{k}": x for k, x in enumerate(entries.get("factors", ()))})
        if plan is not None and marked and entries:
            assert entries["momentum"].placements == p.placements
    whole = {n: x.full_tensor() if hasattr(x, "full_tensor") else x.detach() for n, x in values.items()}
    return whole, optimizer.decomposed, (optimizer.steps, optimizer.param_groups[0]["calls"])


class Derived(Shampoo):
    """Its step calls that of its base class, which has hooks of its own."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)


def against_one_device(rank: int, size: int, layout: str, nested: bool) -> Any:
    exact, decomposed, _ = trained(None, 1, nested)
    Shampoo([torch.ones(1)])
    values, mine, counts = trained(PLANS[layout], size, nested)
    return max(distances(values, exact).values()), sorted(mine), sorted(decomposed), counts


@pytest.mark.parametrize(("layout", "nested"), [("zero3", True), ("tp2-zero2", False)])
def test_each_matrix_is_stepped_on_one_rank_as_on_one_device(
    rank_pool: RankPool, layout: str, nested: bool
) -> None:
    size = 4 if "-" in layout else 2
    results = rank_pool.run(size, against_one_device, layout, nested)
    assert max(distance for distance, *_ in results) < 1e-8
    assert sorted(n for _, mine, _, _ in results for n in mine) == results[0][2]
    assert all(counts == (STEPS, STEPS) for *_, counts in results)


def refused(rank: int, size: int) -> None:
    model: Any = parallelize(Net(), ParallelPlan(world_size=size, **PLANS["zero2"]))
    model(torch.ones(4, WIDTH)).backward()
    with pytest.raises(UnsupportedError, match=r"TwoPasses iterates its param_groups twice"):
        step_whole_matrices(TwoPasses(model.parameters())).step()
    with pytest.raises(UsageError, match="takes an optimizer, not type"):
        step_whole_matrices(Shampoo)  # type: ignore[arg-type]


def test_steps_of_other_forms_are_refused(rank_pool: RankPool) -> None:
    rank_pool.run(2, refused)


def elementwise(rank: int, size: int, marked: int) -> dict[str, float]:
    """Distances to one device where AdamW, marked before that step, steps local tensors, and then states laid out otherwise."""
    results = []
    for world in (1, size):
        torch.manual_seed(0)
        model: Any = Net().double()
        if world > 1:
            parallelize(model, ParallelPlan(world_size=size, **PLANS["zero3"]))
        optimizer: Any = optim.AdamW(model.parameters(), lr=0.1)
        for step in range(STEPS):
            optimizer.zero_grad()
            if step == marked:
                step_whole_matrices(optimizer)
            model(
                torch.randn(4, WIDTH, generator=seeded(step), dtype=torch.float64)
            ).square().sum().backward()
            optimizer.step()
            assert "_meshwright_stepped" not in optimizer.__dict__
            if world > 1 and step == 1:
                for entries in optimizer.state.values():
                    there: Any = entries["exp_avg"]
                    everywhere = [Replicate()] * there.device_mesh.ndim
                    entries["exp_avg"] = distribute_tensor(there.full_tensor(), there.device_mesh, everywhere)
        results.append({n: p.full_tensor() if world > 1 else p.detach() for n, p in model.named_parameters()})
    return distances(results[1], results[0])


@pytest.mark.parametrize("marked", [0, 2])
def test_elementwise_optimizers_keep_nothing_of_a_step(rank_pool: RankPool, marked: int) -> None:
    assert max(rank_pool.run(2, elementwise, marked)[0].values()) < 1e-8
