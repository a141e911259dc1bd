"""A module that several blocks share is recorded by its first name; its work belongs to the block that calls it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshwright_dtensor.strategy import ModuleWork
from meshwright_pipeline.planning.survey import survey
from meshwright_pipeline.planning.unit_costs import model_costs


class Block(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(self.norm(x)))


class SharedNorm(nn.Module):
    """The module itself has the shared norm, too, under its first name."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.layers = nn.ModuleList(Block(self.norm) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_shared_module_is_no_code_between_units() -> None:
    work = []
    for layer in range(3):
        work.append(ModuleWork("norm", 1.0, parameters=frozenset({"norm.weight", "norm.bias"})))
        names = frozenset({f"layers.{layer}.inner.weight", f"layers.{layer}.inner.bias"})
        work.append(ModuleWork(f"layers.{layer}.inner", 1.0, parameters=names))
    costs = model_costs(tuple(work), survey(SharedNorm()).details)
    assert costs.shared == [] and [run.unit for run in costs.runs] == ["layers.0", "layers.1", "layers.2"]
    assert sum(run.seconds for run in costs.runs) == 6.0
