"""Steps of elementwise optimizers run on local tensors; the user's optimizer has DTensors before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from parallel_models import LENGTH, ROWS, VOCABULARY, Language
from torch import optim
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.api.parallelize import parallelize


class OnMesh(TorchFunctionMode):
    """The functions that are called with DTensors."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = [x for a in args for x in (a if isinstance(a, (list, tuple)) else [a])]
        if any(isinstance(x, DTensor) for x in flat):
            self.names.add(getattr(func, "__name__", str(func)))
        return func(*args, **(kwargs or {}))


class Derived(optim.AdamW):
    """A user's subclass may do anything, so it steps DTensors."""


def trained(plan: dict[str, Any]) -> Any:
    torch.manual_seed(2)
    model: Any = parallelize(Language(), ParallelPlan(**plan))
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=seeded(1))

    def backward() -> torch.Tensor:
        model.zero_grad()
        loss = model(ids, labels=ids)
        loss = loss[0] if isinstance(loss, tuple) else loss
        loss.sum().backward()
        return loss.detach().sum()

    backward()
    return model, backward


def steps(rank: int, world_size: int, plan: dict[str, Any], kind: str) -> Any:
    model, _ = trained(plan)
    make = {"adamw": optim.AdamW, "fused": lambda ps: optim.AdamW(ps, fused=True), "derived": Derived}[kind]
    optimizer = make(model.parameters())
    for _ in range(2):
        with OnMesh() as seen:
            optimizer.step()
    used = [p for p in model.parameters() if p.grad is not None]
    placed = all(
        optimizer.state[p][key].placements == p.placements and optimizer.state[p][key].shape == p.shape
        for p in used
        for key in ("exp_avg", "exp_avg_sq")
    )
    return placed and len(used) > 4, seen.names & {"lerp_", "mul_", "addcdiv_", "sqrt", "_fused_adamw_"}


PLANS = [
    {"world_size": 4, "degrees": {"dp": 4}},
    {"world_size": 4, "degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 3}},
]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["adamw", "fused", "derived"])
def test_the_step_sees_local_tensors(rank_pool: RankPool, plan: dict[str, Any], kind: str) -> None:
    for placed, names in rank_pool.run(4, steps, plan, kind):
        assert placed
        assert bool(names) == (kind == "derived"), names


def interrupted(rank: int, world_size: int) -> Any:
    model, backward = trained(PLANS[1])
    optimizer = optim.AdamW(model.parameters())
    parameters = list(optimizer.param_groups[0]["params"])
    optimizer.step()

    def failing() -> Any:
        raise ValueError("in the closure")

    actual = []
    try:
        optimizer.step(failing)
    except ValueError:
        actual.append("closure")
    same = all(a is b for a, b in zip(optimizer.param_groups[0]["params"], parameters, strict=True))
    backward()
    optimizer.step(backward)
    return actual, same, all(isinstance(p, DTensor) for p in optimizer.state)


def test_error_in_a_step_keeps_the_optimizer(rank_pool: RankPool) -> None:
    for actual, same, dtensors in rank_pool.run(4, interrupted):
        assert actual == ["closure"] and same and dtensors


def as_one_device(rank: int, world_size: int, plan: dict[str, Any]) -> Any:
    """AdamW with a scheduler, two groups and a state that comes and goes, against the derived class."""
    finals = []
    for kind in (optim.AdamW, Derived):
        model, backward = trained(plan)
        weights = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim <= 1]
        optimizer = kind([{"params": weights, "lr": 1e-2}, {"params": others, "weight_decay": 0.0}], lr=1e-3)
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for _ in range(3):
            backward()
            optimizer.step()
            scheduler.step()
            optimizer.load_state_dict(optimizer.state_dict())
        finals.append([p.full_tensor().detach().clone() for p in model.parameters()])
    return [torch.equal(a, b) for a, b in zip(*finals, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS)
def test_local_step_equals_the_step_on_dtensors(rank_pool: RankPool, plan: dict[str, Any]) -> None:
    for same in rank_pool.run(4, as_one_device, plan):
        assert all(same), same
