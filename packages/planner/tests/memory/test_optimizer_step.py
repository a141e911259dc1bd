"""Temporary copies of an optimizer step: counted with torch's optimizers, and predicted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from counting import Counting
from planner_models import Transformer, eager, tokens

from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.clusters.registry import DGX_H100, LAPTOP_CPU
from meshwright_planner.cost.operations import COPIES, OPTIMIZERS
from meshwright_planner.cost.optimizers import NAMES, states_per_byte
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
    """(bytes of states, peak bytes of temporaries) of the third step."""
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    optimizer = MADE[name](parameters, lr=0.1, **how)
    for p in parameters:
        p.grad = torch.ones_like(p)
    for _ in range(2):
        optimizer.step()
    held: Iterable[Any] = (x for state in optimizer.state.values() for x in state.values())
    states = [x for x in held if isinstance(x, torch.Tensor) and x.numel() > 1]
    tensors = [*parameters, *(p.grad for p in parameters if p.grad is not None), *states]
    with Counting(tensors) as counting:
        before = counting.alive
        counting.restart()
        optimizer.step()
    return sum(x.numel() * x.element_size() for x in states), counting.peak - before


@pytest.mark.parametrize("name", sorted(COPIES))
@pytest.mark.parametrize("way", ["foreach", "loop", "fused"])
def test_optimizer_copies_equal_those_of_torch(name: str, way: str) -> None:
    how = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}[way]
    states, temporary = counted(name, **how)
    total = 4 * sum(SIZES)
    assert states == OPTIMIZERS[name] * total
    copies = COPIES[name]
    loop = max(
        copies.previous * a + copies.current * b for a, b in pairwise((0, *(4 * size for size in SIZES)))
    )
    expected = {"foreach": copies.together * total, "loop": loop, "fused": 0}[way]
    assert expected <= temporary <= expected + SLACK


def test_all_optimizers_have_counted_copies() -> None:
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
def test_moment_of_the_optimizer_step(name: str, together: bool, expected: Moment) -> None:
    assert optimizer_moment([10.0, 4.0, 5.0], name, together) == expected
    assert optimizer_moment([], name, False).transient_bytes == 0


@pytest.mark.parametrize("name", sorted(COPIES))
def test_planned_gradients_exclude_optimizer_copies(name: str) -> None:
    """Few tokens, so that the peak is in the optimizer step: its copies are separate from gradients."""
    model, batch = Transformer(layers=4), tokens(1, length=4)
    total = sum(p.numel() * p.element_size() for p in model.parameters())
    plans = {}
    for cluster in (DGX_H100, LAPTOP_CPU):
        plan = eager().plan(model, batch, PlanRequest(cluster=cluster, world_size=1, optimizer=name))[0]
        assert plan.predicted is not None
        memory = plans[cluster.name] = plan.predicted.memory_bytes
        assert memory["gradients"] <= total and memory["optimizer"] == OPTIMIZERS[name] * total
    at_once = plans[DGX_H100.name]
    if COPIES[name].together:
        assert (at_once["gradients"], at_once["temporaries"]) == (total, total)
    else:  # nothing is copied: the fullest moment is one of the backward pass, wherever that runs
        assert at_once == plans[LAPTOP_CPU.name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NAMES)
def test_states_have_the_size_of_their_dtype(name: str, dtype: torch.dtype) -> None:
    """Those of 8 and 4 bits whatever the parameters are; all others as the parameters, as torch's own are."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 32)).to(dtype)
    elements = sum(p.numel() for p in model.parameters())
    matrices = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    per_element = {"adamw8bit": 2 * (1 + 4 / 256), "adamw4bit": 2 * (0.5 + 4 / 128)}
    if name in MADE:
        optimizer = MADE[name](model.parameters(), lr=0.1)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        kept = [x for state in optimizer.state.values() for x in state.values() if torch.is_tensor(x)]
        expected = float(sum(x.numel() * x.element_size() for x in kept if x.numel() > 1))
    elif name in per_element:
        expected = elements * per_element[name]
    else:
        kept_of_matrices = {"muon": 1, "shampoo": 1, "soap": 2}[name]
        expected = dtype.itemsize * (kept_of_matrices * matrices + 2 * (elements - matrices))
    assert states_per_byte(name, model) * elements * dtype.itemsize == pytest.approx(expected)


def test_a_plan_in_bfloat16_has_quantized_states_of_the_same_size() -> None:
    batch, predicted = tokens(1, length=4), {}
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("adamw8bit", "adamw"):
            request = PlanRequest(cluster=LAPTOP_CPU, world_size=1, optimizer=name)
            (plan,) = eager().plan(Transformer(layers=2).to(dtype), batch, request)
            assert plan.predicted is not None
            predicted[name, dtype] = plan.predicted.memory_bytes["optimizer"]
    assert predicted["adamw8bit", torch.bfloat16] == predicted["adamw8bit", torch.float32]
    assert predicted["adamw", torch.bfloat16] * 2 == predicted["adamw", torch.float32]
