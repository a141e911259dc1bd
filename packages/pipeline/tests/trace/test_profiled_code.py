"""Code between units that reads modules of other stages, changes its inputs, or decides what runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import VOCABULARY, WIDTH, chain_batch
from torch import Tensor, nn

from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline
from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.side_outputs import CannotBeCut


class Positioned(nn.Embedding):
    """Code outside hands it its own buffer, as in BERT."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.register_buffer("places", torch.linspace(-1, 1, 16)[:, None])

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        return super().forward(ids) + places


class Tower(nn.Module):
    """On later stages it has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        first = next(self.parameters())
        x = x.to(first.device, first.dtype)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tower = Positioned(), Tower()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        # in the rows of this microbatch only; other microbatches have saved theirs for the backward pass
        labels.masked_fill_(labels == 5, 3)
        x = (
            self.embed(ids, self.embed.places[: ids.shape[1]])
            + F.one_hot(labels.clamp(min=0), WIDTH * 8)[..., :WIDTH]
        )
        # nothing needs it
        torch.where(ids[..., None] > 3, self.embed.weight[0], x)
        x = self.tower(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def look(rank: int, size: int) -> float:
    rule = PipelineRule(stages=(["embed", "tower.*"], ["layers.*", "head"]), microbatches=4)
    models, written = [], []
    for parallel in (False, True):
        torch.manual_seed(0)
        plan = ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
        models.append(pipeline(Looking(), plan) if parallel else Looking())
        written.append(chain_batch())
        models[-1](**written[-1]).backward()
    if not torch.equal(written[0]["labels"], written[1]["labels"]):
        return 1.0
    grads: dict[str, Any] = {name: p.grad for name, p in models[0].named_parameters()}
    return max(
        float((p.grad - grads[n]).abs().max() / grads[n].abs().max()) for n, p in models[1].named_parameters()
    )


def test_parameters_of_other_stages_may_be_looked_at_and_inputs_changed(rank_pool: RankPool) -> None:
    assert max(rank_pool.run(2, look)) < 1e-5


class Measured(nn.Module):
    """Code after the last unit uses a number of the first one's result, which a hook watches too."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.seen: list[float] = []
        self.layers[1].register_forward_hook(
            lambda module, args, output: self.seen.append(output.sum().item())
        )

    def forward(self, x: Tensor) -> Tensor:
        h = first = self.layers[0](x)
        for layer in self.layers[1:]:
            h = torch.tanh(layer(h))
        return (h * first.abs().max().item()).square().mean()


def measure(rank: int, size: int) -> list[float]:
    rule = PipelineRule(stages=(["layers.[01]"], ["layers.[23]"]))
    losses = []
    for parallel in (False, True):
        torch.manual_seed(0)
        plan = ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
        model = pipeline(Measured(), plan) if parallel else Measured()
        losses.append(float(model(torch.linspace(-2, 2, 4 * WIDTH).view(4, WIDTH)).detach()))
    return losses


def test_numbers_of_results_are_those_of_one_device(rank_pool: RankPool) -> None:
    for single, many in rank_pool.run(2, measure):
        assert many == pytest.approx(single, rel=1e-6)


def reads(way: str, weight: Tensor, x: Tensor) -> Tensor:
    """Code that turns values of a weight into numbers."""
    if way == "item":
        return x * (1 + weight.abs().max().item())
    if way == "list":
        return x * (1 + weight.tolist()[0][0])
    if way == "array":
        return x * float(weight.detach().numpy()[0, 0])
    if way in ("bool", "any", "equal"):
        values = {"bool": weight.abs().max() > 0, "any": torch.any(weight), "equal": weight.equal(weight + 1)}
        return x * 2 if values[way] else x
    return x


class Deciding(nn.Module):
    """`way`: drops layers at random, replaces a module in its first forward, or reads values of a weight."""

    def __init__(self, way: str, chance: float = 0.0) -> None:
        super().__init__()
        self.way, self.chance = way, chance
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for place, layer in enumerate(self.layers):
            if self.way == "replaces" and type(layer) is nn.Linear:
                self.layers[place] = nn.Sequential(layer)
            if self.way != "drops" or torch.rand([]) >= self.chance:
                x = layer(x)
        x = reads(self.way, self.embed.weight, x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.parametrize(
    ("way", "chance", "text"),
    [
        ("drops", 1e-3, r"module 'layers.0' runs or not by a random number"),
        ("replaces", 0.0, r"module 'layers' replaces modules in it while it runs"),
    ],
)
def test_modules_that_change_from_call_to_call_are_refused_when_planning(
    way: str, chance: float, text: str
) -> None:
    model = Deciding(way, chance)
    with pytest.raises(CannotBeCut, match=text):
        LossChecker(model, find_units(model).names).check(((), chain_batch()))


@pytest.mark.parametrize("way", ["item", "list", "array", "bool", "any", "equal"])
def test_values_of_parameters_that_become_numbers_are_refused_when_planning(way: str) -> None:
    model = Deciding(way)
    with pytest.raises(CannotBeCut, match=r"outside of module 'embed' turns its parameters into numbers"):
        LossChecker(model, find_units(model).names).check(((), chain_batch()))


def test_layers_that_are_dropped_with_chance_0_are_not_refused() -> None:
    model = Deciding("drops")
    assert "random" not in LossChecker(model, find_units(model).names).check(((), chain_batch())).why


def test_a_weight_that_other_modules_have_too_keeps_its_values_there() -> None:
    model = Deciding("drops")
    model.head.weight = model.embed.weight
    copied = skeleton(model, ["head"])
    assert torch.equal(copied.embed.weight, model.embed.weight) and copied.head.weight.is_meta
