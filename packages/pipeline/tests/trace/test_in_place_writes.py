"""Code between units writes to unit results, to buffers, and to submodules of units that it calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import TOKENS, VOCABULARY, WIDTH, chain_batch
from torch import Tensor, nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline
from meshwright_pipeline.analysis.loss_preview import LossChecker
from meshwright_pipeline.analysis.row_mixing import find_row_mixing
from meshwright_pipeline.partition.units import find_units
from meshwright_pipeline.trace.meta_model import skeleton
from meshwright_pipeline.trace.profiler import Profiler

EXPERTS, LIMIT = 4, 1e-5


class Experts(nn.Module):
    """Counts the rows of each expert."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.register_buffer("load", torch.zeros(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        shape, x = x.shape, x.reshape(-1, x.shape[-1])
        weight, choice = self.gate(x).softmax(-1).max(-1)
        self.load.add_(torch.bincount(choice, minlength=EXPERTS))
        made = torch.zeros_like(x)
        for place, expert in enumerate(self.experts):
            made += torch.where((choice == place)[:, None], expert(x) * weight[:, None], 0.0)
        return made.view(shape)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts = nn.Linear(WIDTH, WIDTH), Experts()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.experts(torch.tanh(self.first(x)))


class Routed(nn.Module):
    """`way`: blocks are called, or only their submodules, or the experts are between units."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.embed, self.way = nn.Embedding(VOCABULARY, WIDTH), way
        self.layers = nn.ModuleList(Experts() if way == "between" else Block() for _ in range(2))
        if way == "between":
            self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), Experts()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            if self.way == "parts":
                x = x + layer.experts(torch.tanh(layer.first(x)))
            else:
                x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


class Added(nn.Module):
    """Writes to unit results, and to the result of the first unit also on stages that skip it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        x += 0.5
        for place, layer in enumerate(self.layers):
            x = layer(x)
            if place % 2 == 0:  # results that cross a boundary must not change
                x[:, 1:].mul_(1.5)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def built(way: str) -> nn.Module:
    torch.manual_seed(0)
    return Added() if way == "added" else Routed(way)


STAGES: dict[str, tuple[list[str], list[str], list[str]]] = {
    "blocks": (["embed", "layers.0"], ["layers.1", "head"], []),
    "parts": (["embed"], ["head"], ["layers.*"]),
    "between": (
        ["embed", "layers.0", "layers.1.gate"],
        ["layers.1.experts.*", "head"],
        [],
    ),
    "added": (["embed", "layers.[01]"], ["layers.[23]", "head"], []),
}


def plan(way: str, count: int, shared: bool = True) -> ParallelPlan:
    first, second, everywhere = STAGES[way]
    if not shared:
        first, everywhere = [*first, *everywhere], []
    rule = PipelineRule(stages=(first, second), microbatches=count, shared=everywhere)
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)


def far(tensor: Tensor, other: Tensor) -> float:
    return float((tensor - other).detach().abs().max() / other.detach().abs().max().clamp(min=1e-30))


def step(rank: int, size: int, way: str, count: int) -> tuple[float, list[str]]:
    """The largest distance of loss, gradients and buffers to one device, and the compared names."""
    single, many = built(way), pipeline(built(way), plan(way, count))
    wrong = 0.0
    for number in range(2):
        got, want = many(**chain_batch(number)), single(**chain_batch(number))
        wrong = max(wrong, far(got, want))
        for loss in (got, want):
            loss.backward()
    expected = dict(single.named_parameters())
    used = [
        (n, p) for n, p in many.named_parameters() if expected[n].grad is not None and expected[n].grad.any()
    ]
    wrong = max([wrong, *(far(p.grad, expected[n].grad) for n, p in used)])
    buffers = dict(single.named_buffers())
    held = [name for name, _ in many.named_buffers()]
    return max([wrong, *(far(b, buffers[n]) for n, b in many.named_buffers())]), held


@pytest.mark.parametrize("way", STAGES)
def test_step_matches_one_device(rank_pool: RankPool, way: str) -> None:
    result = rank_pool.run(2, step, way, 4 if way == "added" else 1)
    assert max(wrong for wrong, _ in result) < LIMIT
    if way != "added":
        assert all(held for _, held in result)


def unshared(rank: int, size: int) -> str:
    many = pipeline(built("parts"), plan("parts", 1, shared=False))
    try:
        many(**chain_batch())
    except PlanError as error:
        return str(error)
    return "nothing"


def test_submodules_called_outside_of_their_unit_must_be_shared(rank_pool: RankPool) -> None:
    for told in rank_pool.run(2, unshared):
        assert "'layers.0' itself is never called" in told and "or add it to pipeline.shared" in told


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("way", STAGES)
def test_planning_runs_models_with_in_place_writes(way: str, device: str) -> None:
    with torch.device(device):
        model = built(way)
    units = find_units(model).names
    assert "could not be analysed" not in LossChecker(model, units).check(((), chain_batch())).why
    result = find_row_mixing(model, units, ((), chain_batch()))
    assert (
        (result is None)
        if way == "added"
        else (result is not None and "'load' in every forward" in result.why)
    )


def test_profile_lists_written_results_and_state() -> None:
    model = built("added")
    units = find_units(model).names
    profile = Profiler(skeleton(model, units), units).run((), chain_batch())
    assert {label[0] for label in profile.written} == {"embed", "layers.0", "layers.2"}
    plain: dict[str, Any] = chain_batch(tokens=TOKENS)
    model = built("blocks")
    units = find_units(model).names
    assert not Profiler(skeleton(model, units), units).run((), plain).written


class Averaging(nn.Module):
    """Keeps means of unit results, between and after the units. Nothing else uses the means."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.embed, self.inside = nn.Embedding(VOCABULARY, WIDTH), inside
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for name in ("early", "late", "last"):
            self.register_buffer(name, torch.zeros(VOCABULARY if name == "last" else WIDTH))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for place, layer in enumerate(self.layers):
            if place == 1:
                self.early.mul_(0.9).add_(x.detach().mean((0, 1)))
            if place == 3:
                self.late = 0.9 * self.late + x.detach().mean((0, 1))
            x = layer(x)
        logits = self.head(x)
        # the version of the buffer stays
        self.last.data.mul_(0.9).add_(logits.detach().mean((0, 1)))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()) if self.inside else logits


def averages(rank: int, size: int, inside: bool, told: bool) -> dict[str, float]:
    """How far each buffer is from that of one device after two steps and an evaluation."""

    def made() -> Averaging:
        torch.manual_seed(0)
        return Averaging(inside)

    single, many = made(), pipeline(made(), plan("added", 1))
    if not told:
        call_of(many)._write_state = lambda *values: None
    for model in (single, many):
        for number in range(2):
            model(**chain_batch(number)).sum().backward()
        with torch.no_grad():
            model(**chain_batch(2))
    expected = dict(single.named_buffers())
    return {name: far(buffer, expected[name]) for name, buffer in many.named_buffers()}


@pytest.mark.parametrize("inside", [True, False], ids=["loss inside", "loss outside"])
def test_buffers_between_units_match_one_device_on_every_rank(rank_pool: RankPool, inside: bool) -> None:
    for result in rank_pool.run(2, averages, inside, True):
        assert set(result) == {"early", "late", "last"} and max(result.values()) < LIMIT
    first, second = rank_pool.run(2, averages, inside, False)  # the negative control
    assert first["last"] > 100 * LIMIT and max(second.values()) < LIMIT


class Masked(nn.Module):
    """Writes to the results of its modules in place after they return, as XLM multiplies by the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Tensor:
        mask = (ids > 2).unsqueeze(-1).float()
        first = x = self.embed(ids)
        x *= mask
        for layer in self.layers:
            x = layer(x)
            x *= mask
            x[:, :1] += 0.1
        logits = self.head(x + first)
        logits.mul_(0.5)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def write_in_place(rank: int, size: int, schedule: str, outside: bool) -> float:
    """The largest distance of a gradient from one device."""
    stages = [["embed", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "head"]]
    if schedule == "1f1b":
        stages = [[*stages[0], *stages[1]], [*stages[2], *stages[3]]]
    rule = PipelineRule(stages=stages, microbatches=4, schedule=schedule)
    plan = ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
    models, batch = [], chain_batch()
    for parallel in (False, True):
        torch.manual_seed(0)
        models.append(pipeline(Masked(), plan) if parallel else Masked())
        if outside:
            logits = models[-1](batch["ids"])
            F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
        else:
            models[-1](**batch).backward()
    worst = 0.0
    for name, parameter in models[1].named_parameters():
        expected = models[0].get_parameter(name).grad
        assert expected is not None and parameter.grad is not None
        worst = max(worst, float((parameter.grad - expected).abs().max() / expected.abs().max()))
    return worst


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
@pytest.mark.parametrize("outside", [False, True])
def test_results_written_in_place_after_their_module(
    rank_pool: RankPool, schedule: str, outside: bool
) -> None:
    assert max(rank_pool.run(2, write_in_place, schedule, outside)) < LIMIT
