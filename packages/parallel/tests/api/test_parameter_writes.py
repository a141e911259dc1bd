"""Writes to parameters, gradients and states, directly and through views, have the result of one device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from write_cases import INITS, READS, WRITES, Write

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.on_device import random_state
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize

Tensor = torch.Tensor


class Two(nn.Module):
    """Two matrices: one whose dims any two ranks divide, and one whose dims they do not."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Linear(6, 8), nn.Linear(8, 7)
        self.last = nn.Parameter(torch.randn(7, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(torch.tanh(self.even(x))) @ self.last


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"degrees": {"dp": 2}}),
    "rows": (2, {"degrees": {"tp": 2}, "parameters": ("S(0)", "S(0)")}),
    "columns": (2, {"degrees": {"tp": 2}, "parameters": ("S(1)", "S(1)")}),
    "zero": (2, {"degrees": {"zero": 2}, "zero": {"stage": 3}}),
    "zero1 in bfloat16": (
        2,
        {"degrees": {"zero": 2}, "zero": {"stage": 1}, "precision": {"parameters": "bf16"}},
    ),
    "zero and rows": (
        4,
        {"degrees": {"zero": 2, "tp": 2}, "zero": {"stage": 3}, "parameters": ("S(0)", "S(0)")},
    ),
}
NAMES = ("even.weight", "last")
THROUGHOUT = ("rows", "zero")
"""Layouts for which every case runs in every mode; the other layouts run in one mode each, to save time."""


def plan_of(layout: str) -> ParallelPlan:
    world_size, fields = LAYOUTS[layout]
    rules = [
        ParameterRule(pattern=name, placement={"tp": state})
        for name, state in zip(NAMES, fields.get("parameters", ()), strict=False)
    ]
    return ParallelPlan(world_size=world_size, **{**fields, "parameters": tuple(rules)})


def pair(layout: str, frozen: bool = False) -> tuple[Two, Two]:
    """The model on one device, and the same in parallel."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Two().requires_grad_(not frozen))
    parallelize(models[1], plan_of(layout))
    return models[0], models[1]


def whole(x: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return [whole(single) for single in x]
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def same(actual: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(same, actual, expected))
    return actual.dtype == expected.dtype and torch.equal(actual, expected)


def differences(
    cases: Mapping[str, Write],
    targets: tuple[list[Any], list[Any]],
    mode: Callable[[], Any],
    results: bool = True,
) -> dict[str, str]:
    """Cases whose function leaves another value in a target, or another random state, than on one device.

    `results`: or returns something else.
    """
    single, many = targets
    start = [whole(x) for x in single]
    wrong = {}
    for name, function in cases.items():
        for ours, theirs, value in zip(many, single, start, strict=True):
            seen = []
            for x in (theirs, ours):
                with torch.no_grad():
                    x.copy_(value)
                torch.manual_seed(3)
                try:
                    with mode():
                        result = function(x)
                except Exception as error:
                    seen.append(f"{type(error).__name__}: {str(error)[:160]}")
                    continue
                with torch.no_grad():
                    got = whole(result) if results and isinstance(result, Tensor) else None
                    seen.append([*([] if got is None else [got]), whole(x), random_state()])
            if isinstance(seen[1], str) or isinstance(seen[0], str):
                if seen[0] != seen[1]:
                    wrong[f"{name} of {list(value.shape)}"] = f"{seen[1]!s:.200} instead of {seen[0]!s:.80}"
            elif not same(seen[1], seen[0]):
                wrong[f"{name} of {list(value.shape)}"] = "another value"
        for x, value in zip(single, start, strict=True):
            x.data.copy_(value)
    with torch.no_grad():
        for ours, value in zip(many, start, strict=True):
            ours.copy_(value)
    return wrong


def gradients(model: nn.Module) -> None:
    x = torch.linspace(-1, 1, 24).view(4, 6)
    model(x).float().square().sum().backward()


@contextlib.contextmanager
def as_it_is() -> Iterator[None]:
    """Gradients stay switched on."""
    yield


def to_parameters(rank: int, world_size: int, layout: str, frozen: bool) -> dict[str, str]:
    single, many = pair(layout, frozen)
    targets = tuple([model.get_parameter(name) for name in NAMES] for model in (single, many))
    mode = as_it_is if frozen else torch.no_grad
    half = "bfloat16" in layout  # what is read outside of a forward too: the compute copy
    writes = {name: f for name, f in WRITES.items() if not half or name != "p[mask] = p[mask] * 2"}
    actual = differences(writes, targets, mode, not half) | differences(INITS, targets, as_it_is)
    if not half:
        actual |= differences(READS, targets, mode)
    # the model computes with what was written
    x = torch.linspace(-1, 1, 24).view(4, 6)
    for p, q in zip(*targets, strict=True):
        with torch.no_grad():
            p[1].fill_(0.25)
            q[1].fill_(0.25)
    if not half and not torch.allclose(whole(many(x)), single(x), atol=1e-6):
        actual["forward"] = "another value"
    return actual


def to_gradients_and_states(rank: int, world_size: int, layout: str) -> dict[str, str]:
    single, many = pair(layout)
    runs = [(model, torch.optim.AdamW(model.parameters(), 1e-2)) for model in (single, many)]
    for model, optimizer in runs:
        gradients(model)
        optimizer.step()
    for (_, p), (_, q) in zip(single.named_parameters(), many.named_parameters(), strict=True):
        q.grad.copy_(p.grad)  # equal but for rounding: from here on bit for bit
        for key in ("exp_avg", "exp_avg_sq"):
            runs[1][1].state[q][key].copy_(runs[0][1].state[p][key])
    actual = {}
    for what in ("grad", "exp_avg"):
        targets: tuple[list[Any], list[Any]] = ([], [])
        for side, (model, optimizer) in zip(targets, runs, strict=True):
            for name in NAMES:
                p = model.get_parameter(name)
                side.append(p.grad if what == "grad" else optimizer.state[p][what])
        modes = [("", torch.no_grad), (" with gradients", as_it_is)]
        if layout not in THROUGHOUT:  # one of the two, gradients and states another one
            modes = modes[what == "grad" :][:1]
        for how, mode in modes:
            wrong = differences(WRITES, targets, mode) | differences(READS, targets, mode)
            actual |= {f"{what}{how}: {name}": text for name, text in wrong.items()}
    return actual


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "frozen"),
    [*((layout, False) for layout in LAYOUTS), *((layout, True) for layout in (*THROUGHOUT, "dp2"))],
    ids=lambda value: value if isinstance(value, str) else "frozen" if value else "trained",
)
def test_writes_to_parameters(rank_pool: RankPool, layout: str, frozen: bool) -> None:
    for actual in rank_pool.run(LAYOUTS[layout][0], to_parameters, layout, frozen):
        assert actual == {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_writes_to_gradients_and_states(rank_pool: RankPool, layout: str) -> None:
    for actual in rank_pool.run(LAYOUTS[layout][0], to_gradients_and_states, layout):
        assert actual == {}


def refusals(rank: int, world_size: int, layout: str) -> None:
    _, many = pair(layout)
    for name in NAMES:
        p = many.get_parameter(name)
        before = whole(p)
        # a value that is not the global one
        for wrong in (before[1:], before.double(), before[0], 3.0):
            with pytest.raises(
                UnsupportedError, match=r"the global value, torch\.float32 .*, the same on every rank"
            ):
                p.data = wrong
        with pytest.raises(UnsupportedError, match=r"x\[index\] = value"):
            p.data[0].data = before[0]
        # what autograd would have to record
        for write in (lambda p: p.add_(1), lambda p: p[0].zero_(), lambda p: p[0].__setitem__(1, 2.0)):
            with pytest.raises((RuntimeError, UnsupportedError), match=r"leaf Variable|would not reach"):
                write(p)
        gradients(many)
        with pytest.raises(UnsupportedError, match=r"value\.detach\(\)"):
            p.grad[0] = before[0].clone().requires_grad_() * 2
        with torch.no_grad(), pytest.raises(UnsupportedError, match="would change the shape"):
            p[0].resize_(1)
        # the errors of one device, in its words
        with torch.no_grad():
            for bad, kind, text in (
                (lambda p: p[99], IndexError, "out of bounds"),
                (lambda p: p.view(3, 1), RuntimeError, "is invalid for input of size"),
                (lambda p: p[0].copy_(torch.zeros(99)), RuntimeError, "must match the size of"),
                (lambda p: p.__setitem__(0, torch.zeros(99)), RuntimeError, "expanded size"),
            ):
                with pytest.raises(kind, match=text):
                    bad(p)
        assert torch.equal(whole(p), before)
    view = many.even.weight[0]  # with gradients: of the compute copy
    with torch.no_grad():
        if layout.startswith("zero") or layout == "rows":  # it is no view of the parameter's memory
            with pytest.raises(UnsupportedError, match="would not reach"):
                view.zero_()
        else:
            view.zero_()
            assert not whole(many.even.weight)[0].any()


@pytest.mark.parametrize("layout", ["dp2", "rows", "columns", "zero"])
def test_ambiguous_writes_are_refused(rank_pool: RankPool, layout: str) -> None:
    rank_pool.run(LAYOUTS[layout][0], refusals, layout)


def losing(rank: int, world_size: int) -> list[int]:
    """Writes that reach nothing on either side, and one that reaches another row in parallel."""
    single, many = pair("rows")
    targets = tuple([model.get_parameter(name) for name in NAMES] for model in (single, many))
    lost = {"clone": lambda p: p[0].clone().zero_(), "copy": lambda p: p[[0]].zero_()}
    other = {
        "first or second": lambda p: p[int(isinstance(p, nn.Parameter) and hasattr(p, "full_tensor"))].zero_()
    }
    return [len(differences(cases, targets, torch.no_grad)) for cases in (lost, other)]


def test_comparison_detects_a_lost_write(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, losing) == [[0, 2]] * 2
