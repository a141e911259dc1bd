"""New side outputs in attributes are distinguished from old ones, next to other attributes."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_pipeline.trace.side_outputs import attribute_leaves, new_side_outputs


class Leaves(nn.Module):
    """Drops its old side output, and stores a new one in the same list."""

    def __init__(self, other: Any = None) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.other = other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.losses.clear()
        self.losses.append(x.sum())
        return x


@dataclasses.dataclass
class Unset:
    size: int = 1
    made: torch.Tensor = dataclasses.field(init=False)


@dataclasses.dataclass
class Guarded:
    """Refuses to show a field, as configs of transformers do where layers differ."""

    size: int = 1

    def __getattribute__(self, name: str) -> Any:
        if name == "size":
            raise RuntimeError("differs between layers")
        return super().__getattribute__(name)


@dataclasses.dataclass
class Linked:
    up: Any = None


def linked() -> Linked:
    linked = Linked()
    linked.up = linked
    return linked


def nested() -> list[Any]:
    linked: list[Any] = [1]
    linked.append(linked)
    return linked


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_new_side_output_is_found_when_memory_is_reused(device: str) -> None:
    unit, x = Leaves(), torch.ones(4, 4, device=device)
    for _ in range(8):
        before = attribute_leaves(unit)
        unit(x)
        assert set(new_side_outputs(before, unit)[0]) == {":losses"}


def test_old_side_outputs_are_not_kept_alive() -> None:
    unit = Leaves()
    unit(torch.ones(2, requires_grad=True))
    before = attribute_leaves(unit)
    unit.losses.clear()
    gc.collect()
    assert [leaf() for leaf in before[":losses"][1]] == [None]


@pytest.mark.parametrize("other", [Unset, Guarded, linked, nested])
def test_unset_fields_and_recursive_objects_are_accepted(other: Any) -> None:
    unit = Leaves(other())
    before = attribute_leaves(unit)
    unit(torch.ones(2))
    assert set(new_side_outputs(before, unit)[0]) == {":losses"}
