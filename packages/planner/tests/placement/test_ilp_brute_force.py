"""The integer program against brute force, the quotient, patterns, and the batch."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from brute_force import FREE, brute_force, problem_of
from planner_models import Mlp, Transformer, tokens
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.placement.legal_rows import Legality, batch_dims
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.placement.solve import solve
from meshwright_planner.plan_writer.patterns import Collapser
from meshwright_planner.trace.batch import Batch, scaled
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Tape

BOOK = RuleBook.first_party()


class Tiny(nn.Module):
    """Two readers of one value, and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.a(x))
        return (self.b(h) + h).sum()


@pytest.mark.parametrize("seed", range(4))
def test_program_equals_brute_force(seed: int) -> None:
    problem = problem_of(Tiny(), Batch.of(torch.randn(3, 8)))
    dice = random.Random(seed)
    for k, options in problem.options.items():
        some = dice.sample(options, min(5, len(options)))
        problem.options[k] = [
            replace(o, seconds=dice.choice([0, 1, 2, 5]) * 1e-4 * dice.random()) for o in some
        ]
    solved = solve(problem, FREE)
    best = brute_force(problem)
    assert solved is not None and best < float("inf")
    assert solved.compute_seconds + solved.communication_seconds == pytest.approx(best, rel=1e-6, abs=1e-9)


def test_brute_force_detects_a_wrong_solution() -> None:
    problem = problem_of(Tiny(), Batch.of(torch.randn(3, 8)))
    replicated = problem.replicated()
    problem.options = {k: [replace(o, seconds=o.seconds + 1.0 * (o.ins[0] in ("I", "X"))) for o in options]
                       for k, options in problem.options.items()}  # fmt: skip
    assert brute_force(problem) < replicated.compute_seconds + len(problem.options)


def test_memory_limit_is_met_or_infeasible() -> None:
    problem = problem_of(Mlp(), Batch.of(torch.randn(3, 64)))
    free = solve(problem, FREE)
    weights = 4 * sum(p.numel() * 4 for p in Mlp().parameters())
    tight = solve(problem, replace(FREE, limit=0.6 * weights))
    assert free is not None and tight is not None
    assert free.stored != tight.stored  # on this model communication costs more than it saves
    assert solve(problem, replace(FREE, limit=0.1 * weights)) is None


def test_merged_blocks_give_the_same_solution() -> None:
    model, batch = Transformer(layers=4), Batch.of(tokens())
    merged, whole = problem_of(model, batch), problem_of(model, batch, merge=False)
    assert merged.quotient.groups == [[f"layers.{i}" for i in range(4)]]
    assert len(merged.quotient.nodes) < len(whole.quotient.nodes) / 2
    assert sum(merged.quotient.node_count.values()) == len(whole.quotient.nodes)
    first, second = (solve(p, FREE, divided=p.weights()) for p in (merged, whole))
    assert first is not None and second is not None
    assert first.compute_seconds == pytest.approx(second.compute_seconds, rel=1e-6)
    assert first.communication_seconds == pytest.approx(second.communication_seconds, rel=1e-6)


def test_parallel_siblings_and_other_blocks_are_not_merged() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = Mlp(), Mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.left(x) + self.right(x)

    def groups(model: nn.Module) -> list[list[str]]:
        return quotient(record(model, Batch.of(torch.randn(2, 64)), BOOK.composites)).groups

    assert groups(Branches()) == []
    assert groups(nn.Sequential(nn.Linear(64, 64), Mlp(), Mlp())) == [["1", "2"]]
    assert groups(nn.Sequential(nn.Linear(64, 64), Mlp(), Mlp(64, 32))) == []


def test_pinned_parameter_is_gathered_if_needed() -> None:
    tape = record(Mlp(), Batch.of(torch.randn(3, 64)), BOOK.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, 2), 2)
    legality = Legality(tape, quotient(tape), BOOK, costs)
    solved = solve(PlacementProblem(legality, {"up.weight": 1, "down.bias": 0}), FREE)
    assert solved is not None
    stored = {tape.values[v].name: s for v, s in solved.stored.items()}
    assert (stored["param:up.weight"], stored["param:down.bias"]) == (1, 0)


def test_batch_dims_follow_the_batch_through_views() -> None:
    def dims(tape: Tape, degree: int) -> set[tuple[tuple[int, ...], int]]:
        batch_dims_found = batch_dims(tape, range(len(tape.nodes)), BOOK, degree)
        return {(tape.values[v].shape, d) for v, ds in batch_dims_found.items() for d in ds}

    tape = record(Transformer(layers=1), Batch.of(tokens(rows=4)), BOOK.composites)
    batch_dims_found = dims(tape, 2)
    assert (
        ((4, 32, 64), 0) in batch_dims_found
        and ((4, 8, 32, 8), 0) in batch_dims_found
        and ((128, 512), 0) in batch_dims_found
    )
    assert ((4, 32, 64), 1) not in batch_dims_found and ((4, 32, 64), 2) not in batch_dims_found
    assert dims(tape, 3) == set()  # four rows do not divide by three


def test_patterns_match_only_equal_rules() -> None:
    names = [f"m.layers.{i}.{part}" for i in range(12) for part in ("a.weight", "b.weight")]
    collapser = Collapser([[f"m.layers.{i}" for i in range(12)]])
    wanted = {name: name.endswith("a.weight") for name in names}
    assert [p for p, _, _ in collapser.collapse(wanted)] == ["m.layers.*.a.weight", "m.layers.*.b.weight"]
    wanted["m.layers.5.a.weight"] = False
    result = collapser.collapse(wanted)
    assert ("m.layers.[0-9][0-9].a.weight", True, ["m.layers.10.a.weight", "m.layers.11.a.weight"]) in result
    assert ("m.layers.5.a.weight", False, ["m.layers.5.a.weight"]) in result
    nested = {f"layers.{i}": "block" for i in range(3)} | {f"layers.{i}.mlp": "inner" for i in range(3)}
    patterns = [p for p, _, _ in Collapser([[f"layers.{i}" for i in range(3)]]).collapse(nested)]
    assert patterns == ["layers.[0-9]", "layers.*.mlp"]  # "layers.*" would match the inner ones too


def test_batches_in_every_form() -> None:
    x = torch.zeros(4, 5)
    assert (
        Batch.of(x).args == (x,) and Batch.of((x, 1)).args == (x, 1) and Batch.of({"a": x}).kwargs == {"a": x}
    )
    nested = Batch.of({"a": {"b": x, "c": [x]}, "flag": True})
    assert [name for name, _ in nested.tensors()] == ["a.b", "a.c.0"] and nested.size == 4
    assert Batch.of(tokens(rows=3, length=9)).sequence_length == 9 and Batch.of(x).sequence_length is None
    bigger = scaled(nested, 12)
    assert {t.shape for _, t in bigger.tensors()} == {(12, 5)} and bigger.kwargs["flag"] is True
