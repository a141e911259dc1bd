"""Calls that need every rank and that not all ranks make, without a pipeline: an error on every rank."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.rank_pool import RankError, RankPool

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


def killed(rank: int, size: int, path: str) -> None:
    """Rank 0 makes a call after rank 1 was killed, and writes down the error."""
    model = parallel("tp")
    with torch.no_grad():
        model(rows())
    if rank:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        model[0].weight.full_tensor()
    except UsageError as error:
        Path(path).write_text(str(error))


def test_a_rank_that_is_gone_is_noticed(tmp_path: Path) -> None:
    with RankPool(grace=20.0) as pool, pytest.raises(RankError, match="SIGKILL"):
        pool.run(2, killed, str(tmp_path / "error"))
    error = (tmp_path / "error").read_text()
    assert "another rank has ended, and rank 0 test_call_order.py" in error


def failing(rank: int, size: int) -> int:
    """Calls that the comparison takes to be inside of the model after one that failed before it was entered."""
    model = parallel("tp")

    def fail(*_: Any) -> None:
        raise ValueError("before the model")

    handle = model.register_forward_pre_hook(fail, prepend=True)
    with pytest.raises(ValueError, match="before the model"):
        model(rows())
    handle.remove()
    model(rows())
    return int(MeshContext.of(model[0].weight.device_mesh).calls._inside)


def test_a_call_that_fails_early_is_not_inside(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, failing) == [0, 0]
