"""What a step of an optimizer makes beside gradients and states: counted with torch's own, and as predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from planner_models import Transformer, eager, tokens

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.calibration.live_bytes import Counting
from meshwright_planner.clusters.registry import DGX_H100, LAPTOP_CPU
from meshwright_planner.cost.operations import COPIES, OPTIMIZERS
from meshwright_planner.memory.peak import Moment, optimizer_moment

SIZES = (64 * 64, 128 * 64, 16)
"""Elements of the parameters that are stepped."""

MADE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "sgd": torch.optim.SGD,
    "sgd-momentum": lambda ps, **how: torch.optim.SGD(ps, momentum=0.9, **how),
}
SLACK = 256
"""Bytes of scalars that a step makes."""


def counted(name: str, **how: bool) -> tuple[int, int]:
    """(bytes of states, most bytes beside them) of the third step."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer = MADE[name](parameters, lr=0.1, **how)
    for p in parameters:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    held: Iterable[Any] = (x for state in optimizer.state.values() for x in state.values())
    states = [x for x in held if isinstance(x, torch.Tensor) and x.numel() > 1]
    known = [*parameters, *(p.grad for p in parameters if p.grad is not None), *states]
    with Counting(known) as counting:
        before = counting.alive
        counting.restart()
        optimizer.step()
    return sum(x.numel() * x.element_size() for x in states), counting.peak - before


@pytest.mark.parametrize("name", sorted(COPIES))
@pytest.mark.parametrize("way", ["foreach", "loop", "fused"])
def test_copies_are_those_that_torch_makes(name: str, way: str) -> None:
    how = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[way]
    states, beside = counted(name, **how)
    every = 4 * sum(SIZES)
    assert states == OPTIMIZERS[name] * every
    copies = COPIES[name]
    loop = max(copies.last * a + copies.own * b for a, b in pairwise((0, *(4 * size for size in SIZES))))
    expected = {"foreach": copies.together * every, "loop": loop, "fused": 0}[way]
    assert expected <= beside <= expected + SLACK


def test_no_more_optimizers_are_offered_than_were_counted() -> None:
    assert set(COPIES) == set(OPTIMIZERS) == set(MADE)


@pytest.mark.parametrize(
    ("name", "together", "expected"),
    [
        ("adamw", True, Moment(0.0, 1.0, 20.0, stepping=True, copies=1.0)),
        ("adamw", False, Moment(0.0, 1.0, 20.0, stepping=True)),
        ("sgd", True, Moment(0.0, 1.0, 0.0, stepping=True)),
        ("sgd-momentum", False, Moment(0.0, 1.0, 0.0, stepping=True)),
    ],
)
def test_the_moment_of_a_step(name: str, together: bool, expected: Moment) -> None:
    assert optimizer_moment([10.0, 4.0, 5.0], name, together) == expected
    assert optimizer_moment([], name, False).transient_bytes == 0


@pytest.mark.parametrize("name", sorted(COPIES))
def test_gradients_of_a_plan_are_gradients(name: str) -> None:
    """Few tokens, so that memory is fullest while the optimizer steps: what it copies is told apart from gradients."""
    model, batch = Transformer(layers=4), tokens(1, length=4)
    every = sum(p.numel() * p.element_size() for p in model.parameters())
    found = {}
    for cluster in (DGX_H100, LAPTOP_CPU):
        plan = eager().plan(model, batch, PlanRequest(cluster=cluster, world_size=1, optimizer=name))[0]
        assert plan.predicted is not None
        memory = found[cluster.name] = plan.predicted.memory_bytes
        assert memory["gradients"] <= every and memory["optimizer"] == OPTIMIZERS[name] * every
    at_once = found[DGX_H100.name]
    if COPIES[name].together:
        assert (at_once["gradients"], at_once["temporaries"]) == (every, every)
    else:  # nothing is copied: the fullest moment is one of the backward pass, wherever that runs
        assert at_once == found[LAPTOP_CPU.name]
