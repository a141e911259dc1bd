"""Data ranks of models with interacting rows: whole-batch work, collectives, saved tensors, and notes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from planner_models import HOST, LAPTOP_CPU, DataLike, Transformer, best, host_of, tokens
from torch import nn

from meshwright_dtensor.strategy import PlanRequest, Survey
from meshwright_planner import EagerPlanner
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.planners.eager import default_rules

WIDTH = 64
HELPS = "data parallelism does not help in "


class Between(nn.Module):
    """An operation between two products."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second, self.operation = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), operation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, WIDTH]."""
        return self.second(self.operation(self.first(x))).pow(2).mean()


class Block(nn.Module):
    """Two products, and rows added to those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [rows, WIDTH]."""
        return x + self.second(self.first(x).cumsum(0))


class Over(nn.Module):
    """A layer that goes along what data ranks divide: with other rows it does other operations."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.second = nn.RNN(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [time, rows, WIDTH]."""
        return self.second(self.layer(x)[0]).pow(2).mean()


class Inside(DataLike):
    """Data ranks where a strategy runs a module on each rank's rows."""

    def survey(self, model: nn.Module) -> Survey | None:
        return Survey(modules=("1",))


def masked(h: torch.Tensor) -> torch.Tensor:
    """Some of the rows, chosen by what is in them."""
    return h[h[:, 0] > -1e9]


def search(model: nn.Module, batch: Any, host: Any = HOST, **options: Any) -> Search:
    options = {"cluster": LAPTOP_CPU, "world_size": 2, **options}
    request = PlanRequest(**options)
    return Search(EagerPlanner(host).setting(model, batch, request, host), default_rules())


def flops(model: nn.Module, batch: Any, degree: int, host: Any = HOST) -> float:
    evaluator = search(model, batch, host, world_size=degree)
    result = evaluator.evaluate({"dp": degree})
    return Placed(evaluator.basis, result.problem, result.placement).flops


def notes(model: nn.Module, batch: Any, **options: Any) -> list[str]:
    result = best(model, batch, world_size=2, dp=2, **options)
    return [n for n in result.provenance.notes if n.startswith((HELPS, "rows interact across "))]


def moved(model: nn.Module, batch: Any, **options: Any) -> Counter[tuple[str, str]]:
    counted: Counter[tuple[str, str]] = Counter()
    for c in best(model, batch, world_size=2, dp=2, **options).collectives:
        if c.why != "gradients":
            counted[c.kind, c.phase] += c.nbytes * c.count
    return counted


def test_batch_independent_model_is_unchanged() -> None:
    model, batch = Transformer(), tokens(8)
    assert not notes(model, batch) and not moved(model, batch)
    evaluator = search(model, batch)
    assert evaluator.evaluate({"dp": 2}).problem.tape.division is None
    assert flops(model, batch, 2) == flops(model, batch, 1) / 2


def test_replicated_work_of_the_whole_batch_is_noted_and_counted() -> None:
    model, x = Between(masked), torch.randn(16, WIDTH)
    product = 2.0 * 16 * WIDTH * WIDTH
    # the first product has no gradient for its input; the second is whole on both
    assert flops(model, x, 1) == 2 * product + 3 * product
    assert flops(model, x, 2) == 2 * product / 2 + 3 * product
    helps, meets = notes(model, x)
    assert helps == (
        f"{HELPS}the model itself, second, which every rank of dp computes for the whole batch: __getitem__ needs rows "
        "of other ranks"
    )
    assert meets == "rows interact across dp in __getitem__: 4.0 KiB moved in a forward and backward pass"
    assert moved(model, x) == {("all_gather", "forward"): 16 * WIDTH * 4 + 16}
    links = tuple(replace(link, latency_s=1e-2, protocols=()) for link in LAPTOP_CPU.links)
    slow = replace(LAPTOP_CPU, links=links)
    fast, two = (best(model, x, world_size=2, dp=2, cluster=c).predicted for c in (LAPTOP_CPU, slow))
    assert fast is not None and two is not None and two.split is not None
    assert two.split.exposed["dp"] - fast.split.exposed["dp"] > 1e-2  # in addition to the sum of gradients


def test_permuted_rows_are_moved_and_stay_sharded() -> None:
    model, x = Between(lambda h: h.flip(0)), torch.randn(16, WIDTH)
    assert flops(model, x, 2) == flops(model, x, 1) / 2
    size = 16 * WIDTH * 4
    assert moved(model, x) == {
        ("all_to_all", "forward"): size,
        ("all_to_all", "backward"): size,
        ("all_reduce", "forward"): size,
    }
    (helps,) = [n for n in notes(model, x) if n.startswith(HELPS)]
    assert helps.startswith(f"{HELPS}the model itself,") and helps.endswith(": pow needs rows of other ranks")


def test_operations_count_the_whole_batch() -> None:
    """A layer over the first dim takes as many steps as the batch has rows, however many a rank has of them."""
    model, x = Over(), torch.randn(8, 4, WIDTH)
    tape = search(model, x).evaluate({"dp": 2}).problem.tape
    steps = sum(node.name == "aten.tanh.default" for node in tape.nodes)
    assert steps == 8 and tape.division is not None
    assert notes(model, x)


def test_copies_of_a_block_may_interact_differently() -> None:
    """The first block gets sharded rows; its output has another layout."""
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(16, WIDTH)
    evaluator = search(model, x)
    problem = evaluator.evaluate({"dp": 2}).problem
    shapes = {tuple(v.shape) for v in problem.tape.values}
    assert problem.tape.division is not None and (16, WIDTH // 2) in shapes
    assert sum(problem.quotient.node_count.values()) == len(problem.tape.nodes)
    assert flops(model, x, 2) == flops(model, x, 1) / 2


def test_recomputed_module_communicates_again() -> None:
    model, x = nn.Sequential(*(Block() for _ in range(4))), torch.randn(16, WIDTH)
    once, twice = moved(model, x), moved(model, x, recompute="[0-3]")
    assert twice["all_to_all", "backward"] == once["all_to_all", "backward"]
    assert twice["all_to_all", "forward"] > once["all_to_all", "forward"]


def test_modules_that_strategies_run_are_left_out() -> None:
    body = Between(masked)
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), body), torch.randn(16, WIDTH)
    assert search(model, x).evaluate({"dp": 2}).problem.tape.division is not None
    inside = host_of(Inside)
    assert search(model, x, inside).evaluate({"dp": 2}).problem.tape.division is None


@pytest.mark.parametrize("degree", [2, 4])
def test_gathered_values_are_saved_whole(degree: int) -> None:
    """The second product keeps all rows, as autograd does on every rank."""
    model, x = Between(masked), torch.randn(16, WIDTH)
    tape = search(model, x, world_size=degree).evaluate({"dp": degree}).problem.tape
    kept = {item.nbytes for item in tape.saved if tape.nodes[item.by].module == "second"}
    assert 16 * WIDTH * 4 in kept


def test_small_interaction_adds_collectives_without_changing_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large model; rows of normed features meet in two sums each way."""
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(9))
    )
    x = torch.randn(256, WIDTH)
    exact = moved(model, x)
    monkeypatch.setattr("meshwright_planner.trace.row_coupling.SMALL", 0)
    monkeypatch.setattr("meshwright_planner.evaluation.tapes.SMALL", 0)
    assert exact == moved(model, x) and exact["all_reduce", "backward"] == 2 * 4 * WIDTH
    assert [n for n in notes(model, x) if n.startswith("rows interact across dp in batch_norm (1)")]
    tape = search(model, x).evaluate({"dp": 2}).problem.tape
    assert tape.division is not None and tape.origin is not None


def test_no_long_run_for_a_data_dependent_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright_planner.trace.row_coupling.REAL_WORK", 0.0)
    result = best(Between(masked), torch.randn(16, WIDTH), world_size=2, dp=2)
    assert any(
        n.startswith("the cost of cross-row interaction is not predicted") for n in result.provenance.notes
    )
    assert not moved(Between(masked), torch.randn(16, WIDTH))
