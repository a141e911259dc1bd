"""`torch.compile` before a model becomes parallel means compile=True."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.compile.report import regions

pytestmark = pytest.mark.host("regions run as they are under a default device")


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.sigmoid(self.up(x)).sin())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x).pow(2).mean()


def whole(model: Any) -> Any:
    return torch.compile(model, backend="eager")


def in_place(model: Any) -> Any:
    model.compile(backend="eager")
    return model


def one_layer(model: Any) -> Any:
    model.layers[1].compile(backend="eager")
    return model


def wrapped_head(model: Any) -> Any:
    model.head = torch.compile(model.head, backend="eager")
    return model


CASES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "model": (whole, ["layers.0", "layers.1"]),
    "model in place": (in_place, ["layers.0", "layers.1"]),
    "layer in place": (one_layer, ["layers.1"]),
    "part": (wrapped_head, ["head"]),
}


def _run(rank: int, size: int, name: str) -> None:
    make, expected = CASES[name]
    torch.manual_seed(0)
    model = Model()
    reference, names = copy.deepcopy(model), set(model.state_dict())
    given = make(model)
    bad = ParallelPlan(world_size=2, degrees={"dp": 2}, recompute=({"pattern": "nothing"},))
    with pytest.raises(PlanError):
        parallelize(given, bad)
    plan = ParallelPlan(world_size=2, degrees={"dp": 2})
    parallel: Any = parallelize(given, plan)
    assert type(parallel) is Model and set(parallel.state_dict()) == names
    x = torch.randn(4, 8)
    for _ in range(4):
        for each in (parallel, reference):
            each.zero_grad()
            each(x).backward()
    for p, q in zip(parallel.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    ran = regions(parallel).rows
    assert [row.module for row in ran] == expected[:1] and ran[0].modules == len(expected)
    assert ran[0].compiled > 0


@pytest.mark.parametrize("name", CASES)
def test_what_torch_compile_was_called_with_is_a_region(rank_pool: RankPool, name: str) -> None:
    rank_pool.run(2, _run, name)
