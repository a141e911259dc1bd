"""Calls that need every rank and that not all ranks make, without a pipeline: an error on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.rank_pool import RankPool

PLANS: dict[str, dict[str, Any]] = {
    "dp": {"degrees": {"dp": 2}},
    "tp": {
        "degrees": {"dp": 1, "tp": 2},
        "parameters": (
            ParameterRule(pattern="0.*", placement={"tp": "S(0)"}),
            ParameterRule(pattern="2.weight", placement={"tp": "S(1)"}),
        ),
    },
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
}


def parallel(name: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
    return mw.parallelize(model, ParallelPlan(world_size=2, **PLANS[name]))


def rows() -> Tensor:
    return torch.arange(32.0).view(4, 8).cos()


def evaluated(model: Any, path: str) -> None:
    model.eval()
    with torch.no_grad():
        model(rows())


def stepped(model: Any, path: str) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CALLS: dict[str, Callable[[Any, str], Any]] = {
    "evaluation": evaluated,
    "step": stepped,
    "norm": lambda model, path: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "largest": lambda model, path: float(model[0].weight.detach().abs().max()),
    "whole": lambda model, path: model[2].weight.full_tensor(),
    "save": lambda model, path: mw.save(path, model=model),
}
COMMUNICATES = {
    "dp": {"evaluation", "step", "save"},
    "tp": set(CALLS),
    "zero3": set(CALLS),
}


def alone(rank: int, size: int, name: str, call: str, path: str) -> str:
    """The error where rank 0 makes a call that rank 1 does not, which then calls the model another time."""
    model = parallel(name)
    model(rows()).square().sum().backward()
    try:
        if rank == 0:
            CALLS[call](model, path)
        with torch.no_grad():
            model(rows())
    except UsageError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", list(PLANS))
def test_a_call_of_one_rank_alone_is_named(rank_pool: RankPool, name: str, tmp_path: Any) -> None:
    for call in CALLS:
        errors = rank_pool.run(2, alone, name, call, str(tmp_path / call))
        assert errors[0] == errors[1]
        if call in COMMUNICATES[name]:
            assert "ranks make different calls that need every rank" in errors[0]
            assert "rank 0 test_call_order.py" in errors[0] and "rank 1 test_call_order.py" in errors[0]
        else:
            assert not errors[0]


def trained(rank: int, size: int, name: str) -> list[int]:
    """Calls that were compared until the end of each of three steps; ranks read the loss in lines of their own."""
    model, compared = parallel(name), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (mesh,) = {p.device_mesh for p in model.parameters()}
    for _ in range(3):
        loss = model(rows()).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank:
            loss.item()
        else:
            float(loss)
        compared.append(len(MeshContext.of(mesh).calls._followed))
    return compared


@pytest.mark.parametrize("name", list(PLANS))
def test_calls_in_a_known_order_are_not_compared(rank_pool: RankPool, name: str) -> None:
    for first, second, third in rank_pool.run(2, trained, name):
        assert 0 < first <= second == third
