"""Units that exchange tensors in lists, dicts and objects that they are given."""

from __future__ import annotations

from collections import UserDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import VOCABULARY, WIDTH, chain_batch
from torch import Tensor, nn

from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.analysis.row_mixing import find_row_mixing
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.trace.side_outputs import CannotBeCut


class Shared:
    """An object of any class."""


class Layer(nn.Module):
    """The first one leaves its values for all others (value residuals, shared keys and values)."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, shared: Any, way: str) -> Tensor:
        value = self.value(x)
        place = vars(shared) if isinstance(shared, Shared) else shared
        if isinstance(place, list):
            first, calls = place[0] if place else None, len(place)
            place.append(value)
        else:
            first, calls = place.get("first"), place.get("calls", 0)
            if first is None:
                place["first"] = (value - value.mean(0) if way == "mixed" else value, {"twice": value * 2})
            elif way == "popped":
                del place["first"]
            elif way == "flag":
                place.pop("late", None)
            if way == "constants" and not calls:
                place["scales"] = frozenset((0.5,))
            value = value * sum(place.get("scales", (1,)))
            place["calls"] = calls + 1
            if way == "measured":
                place["late"] = round(float(value.detach().sum()), 3)
            elif way == "flag" and "late" not in place and not calls:
                place["late"] = False
            first = first and first[0] + 0.1 * calls * first[1]["twice"]
        return x + torch.tanh(self.out(value if first is None else 0.5 * (value + first)))


class Sharing(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.embed = way, nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        shared = {"list": list, "object": Shared, "user": UserDict}.get(self.way, dict)()
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, shared, self.way)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def step(rank: int, size: int, way: str) -> float:
    """The largest distance of a gradient to that of one device."""
    stages = (["embed", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "head"])
    rule = PipelineRule(stages=stages, microbatches=4, schedule="interleaved")
    models = []
    for parallel in (False, True):
        torch.manual_seed(0)
        plan = ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
        models.append(pipeline(Sharing(way), plan) if parallel else Sharing(way))
        models[-1](**chain_batch()).backward()
    grads: dict[str, Any] = {name: p.grad for name, p in models[0].named_parameters()}
    return max(
        float((p.grad - grads[n]).abs().max() / grads[n].abs().max()) for n, p in models[1].named_parameters()
    )


@pytest.mark.parametrize("way", ["list", "dict", "object", "user", "constants"])
def test_what_a_unit_leaves_in_a_container_reaches_later_stages(rank_pool: RankPool, way: str) -> None:
    assert max(rank_pool.run(2, step, way)) < 1e-5


@pytest.mark.parametrize("way", ["popped", "flag"])
def test_a_unit_that_removes_what_others_left_is_refused_when_planning(way: str) -> None:
    model = Sharing(way)
    with pytest.raises(CannotBeCut, match=r"module 'layers.1' removes entries from a list, dict or object"):
        LossChecker(model, find_units(model).names).check(((), chain_batch()))


def measured(rank: int, size: int) -> str:
    try:
        step(rank, size, "measured")
    except MeshwrightError as error:
        return str(error)
    return ""


def test_numbers_of_the_data_that_units_leave_for_other_stages_are_refused(rank_pool: RankPool) -> None:
    for text in rank_pool.run(2, measured):
        assert "module 'layers.0' returns" in text and "needs the same plain values" in text


def test_rows_that_interact_in_what_a_unit_leaves_are_seen() -> None:
    model = Sharing("mixed")
    mixing = find_row_mixing(model, find_units(model).names, ((), chain_batch()))
    assert mixing is not None and "'layers.0' computes a row differently" in str(mixing)
