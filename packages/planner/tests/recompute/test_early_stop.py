"""How far modules run again, against torch's checkpointing."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.planners.eager import default_rules
from meshwright_planner.recompute.region import Region
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(x) * self.scale


BLOCKS = {
    "ends with a product": lambda: nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6)),
    "ends with a function of its input": lambda: nn.Sequential(nn.Linear(6, 6), nn.SiLU()),
    "ends with a function of its result": lambda: nn.Sequential(nn.Linear(6, 6), nn.Sigmoid()),
    "ends with a norm": lambda: nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)),
    "ends with a mask": lambda: nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5)),
    "residual": Residual,
    "scaled": Scaled,
}


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inside = nn.Linear(6, 6)
        self.blocks = nn.ModuleList(BLOCKS[kind]() for _ in range(3))
        self.outside = nn.Linear(6, 6)
        self.again = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.outside(x).square().mean()


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations["product" if "mm." in str(func) else str(func)] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", BLOCKS)
def test_recompute_stops_where_torch_stops(kind: str) -> None:
    model, x = Model(kind), torch.randn(4, 6)
    counts = []
    for model.again in (False, True):
        with Counted() as counted:
            model(x).backward()
        counts.append(counted.operations)
    model.again = False
    tape = record(model, Batch.of((x,)), default_rules().composites, None)
    region = Region(tape, quotient(tape), lambda _: 0.0, [RecomputeRule(pattern="blocks.*")])
    planned = Counter[str]()
    for n in region.repeated:
        operation = tape.nodes[n].name
        planned["product" if operation == "linear" or "mm." in operation else operation] += 1
    names = {"product"} | {
        n for n in planned if any(part in n for part in ("tanh", "sigmoid", "silu", "norm"))
    }
    ran = counts[1] - counts[0]
    assert {name: planned[name] for name in names} == {name: ran[name] for name in names}
