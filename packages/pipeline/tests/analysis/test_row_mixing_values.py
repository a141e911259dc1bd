"""The row-mixing trial with mask values, arrays and flags."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mixing_models import MIXING, WIDTH, batch, changed, plan, writing
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.analysis.row_mixing import CannotSplit, find_row_mixing
from meshwright_pipeline.partition.units import find_units


def found(model: nn.Module, given: dict[str, Tensor] | None = None) -> CannotSplit | None:
    return find_row_mixing(model, find_units(model).names, ((), batch() if given is None else given))


@pytest.mark.parametrize("left", [0.0, -1e9, torch.finfo(torch.float32).min, float("-inf"), float("nan")])
def test_mask_values_do_not_hide_differences(left: float) -> None:
    def masked(x: Tensor) -> Tensor:
        return x.masked_fill(torch.arange(WIDTH) == 2, left)

    assert found(changed(lambda x: masked(x - x.mean(0)), True)) is not None
    assert found(changed(masked, True)) is None


def test_large_values_set_the_tolerance() -> None:
    """The negative control: a difference next to a large value is rounding, not row mixing."""
    assert found(changed(lambda x: (x + 1e6 * torch.arange(WIDTH)) - 1e6 * torch.arange(WIDTH), True)) is None


def test_written_arrays_and_parameters_are_found() -> None:
    np = pytest.importorskip("numpy")

    def count(m: Any, x: Tensor) -> None:
        m.__dict__.setdefault("array", np.zeros(3))
        m.array += 1

    def shrink(m: Any, x: Tensor) -> None:
        m.scale.data.mul_(0.9)

    for inside in (True, False):
        told = found(writing(count, inside))
        assert told is not None and "writes to its 'array' in every forward" in told.why
    model = writing(shrink, False)
    model.scale = nn.Parameter(torch.ones(WIDTH))
    told = found(model)
    assert told is not None and "the model writes to its 'scale' in every forward" in told.why


class Flagged(nn.Module):
    """Mixes rows if its flag is set."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, y: Tensor, how: str = "alone", step: int = 0) -> Tensor:
        for place, layer in enumerate(self.layers):
            x = layer(MIXING["mean"](x) if place == 1 and how == "mixed" else x)
        return F.mse_loss(x, y)


def flagged(rank: int, size: int) -> tuple[str, int]:
    """The error for a flag that is set later, and the number of trials."""
    torch.manual_seed(0)
    model = pipeline(Flagged(), plan(4))
    for step in range(3):
        model(**batch(step), step=step)
    looks = len(model.__dict__["_meshwright_pipeline"].preparation._row_checks)
    with pytest.raises(PlanError) as error:
        model(**batch(), how="mixed")
    return str(error.value), looks


def test_each_call_signature_is_checked(rank_pool: RankPool) -> None:
    for told, looks in rank_pool.run(2, flagged):
        assert "the code before module 'layers.1' combines several rows" in told and looks == 1
