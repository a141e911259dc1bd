"""What compile= selects: repeated blocks, or the modules that patterns name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_planner import plan
from meshwright_planner.plan_writer.compile_rules import compile_rules


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.GELU())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.head = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def patterns(model: nn.Module, wanted: bool | str | list[str] | None) -> list[str]:
    return [rule.pattern for rule in compile_rules(model, wanted)]


def test_true_is_the_repeated_blocks() -> None:
    assert patterns(Model(), True) == ["layers.*"]
    assert patterns(nn.Sequential(block(), block()), True) == ["*"]
    assert patterns(Model(), None) == patterns(Model(), False) == []
    assert patterns(Model(), ["head", "layers.1"]) == ["head", "layers.1"]


def test_what_is_not_there_is_refused_with_a_name() -> None:
    with pytest.raises(UsageError, match="no repeated blocks; name its modules"):
        patterns(nn.Sequential(nn.Linear(4, 4)), True)
    with pytest.raises(UsageError, match=r"layer.\*.*did you mean"):
        patterns(Model(), "layer.*")


def test_a_plan_keeps_it_and_the_model_stays_compiled() -> None:
    model = torch.compile(Model(), backend="eager")
    made = plan(model, torch.randn(4, 4), world_size=1, cluster="laptop-cpu")  # type: ignore[arg-type]
    assert [rule.pattern for rule in made.compile] == ["layers.*"]  # type: ignore[union-attr]
    assert hasattr(model, "_orig_mod")
    other = plan(Model(), torch.randn(4, 4), world_size=1, cluster="laptop-cpu", compile="head")
    assert other.compile[0].backend == "inductor"  # type: ignore[union-attr]
    for wrong in (3, [], [1], ""):
        with pytest.raises(UsageError, match="neither True"):
            plan(Model(), torch.randn(4, 4), world_size=1, compile=wrong)  # type: ignore[arg-type]
