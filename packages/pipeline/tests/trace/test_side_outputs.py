"""What units leave in attributes is told from what was there before, whatever else is there."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn

from meshwright_pipeline.trace.side_outputs import attribute_leaves, new_side_outputs


class Leaves(nn.Module):
    """Lets go of what it left before, and leaves something new in the same list."""

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
class Linked:
    up: Any = None


def linked() -> Linked:
    found = Linked()
    found.up = found
    return found


def nested() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_is_left_anew_is_seen_where_memory_is_used_again(device: str) -> None:
    unit, x = Leaves(), torch.ones(4, 4, device=device)
    for _ in range(8):
        before = attribute_leaves(unit)
        unit(x)
        assert set(new_side_outputs(before, unit)[0]) == {":losses"}


def test_what_was_there_is_not_kept_alive() -> None:
    unit = Leaves()
    unit(torch.ones(2, requires_grad=True))
    before = attribute_leaves(unit)
    unit.losses.clear()
    gc.collect()
    assert [leaf() for leaf in before[":losses"][1]] == [None]


@pytest.mark.parametrize("other", [Unset, linked, nested])
def test_fields_that_are_not_set_and_objects_that_hold_themselves_are_no_obstacle(other: Any) -> None:
    unit = Leaves(other())
    before = attribute_leaves(unit)
    unit(torch.ones(2))
    assert set(new_side_outputs(before, unit)[0]) == {":losses"}
