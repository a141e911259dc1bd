"""Muon computes each matrix on one rank, with the numbers of one device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim
from torch.optim import _muon

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.plan import ParallelPlan, ParameterRule
from meshwright_dtensor.testing.on_device import seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize

WIDTH, ODD, ODDER = 64, 65, 67
STEPS = 5
OWNERS = {
    f"layers.{layer}.{name}.weight": (layer + place) % 2
    for layer in range(2)
    for place, name in enumerate(("up", "down", "odd", "back", "small"))
}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"degrees": {"dp": 2}},
    **{f"zero{stage}": {"degrees": {"zero": 2}, "zero": {"stage": stage}} for stage in (1, 2, 3)},
    "dp2-zero2": {"degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 2}},
    "owners3": {"degrees": {"zero": 2}, "zero": {"stage": 3, "owners": OWNERS}},
    "owners-dp2-1": {"degrees": {"dp": 2, "zero": 2}, "zero": {"stage": 1, "owners": OWNERS}},
    "tp2-zero2": {
        "degrees": {"zero": 2, "tp": 2},
        "zero": {"stage": 2},
        "parameters": (
            ParameterRule(pattern="layers.*.up.weight", placement={"tp": "S(0)"}),
            ParameterRule(pattern="layers.*.down.weight", placement={"tp": "S(1)"}),
        ),
    },
}
PLANS["owners-tp2-2"] = {**PLANS["tp2-zero2"], "zero": {"stage": 2, "owners": OWNERS}}


class Layer(nn.Module):
    """Matrices that two ranks can share evenly, in rows only, and not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * ODD, bias=False), nn.Linear(2 * ODD, WIDTH)
        self.odd, self.back = nn.Linear(WIDTH, ODD, bias=False), nn.Linear(ODD, ODDER, bias=False)
        self.small = nn.Linear(ODDER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(x)))
        return x + self.small(self.back(self.odd(x)))


class Net(nn.Module):
    """Layers of matrices, in which a frozen one is as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.layers[1].odd.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class Derived(optim.Muon):
    """A user's subclass may do anything, so all ranks compute with their shards."""


@contextmanager
def counted() -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the matrices that are orthogonalised on this rank."""
    inner, shapes = _muon._zeropower_via_newtonschulz, []

    def count(grad: Tensor, *args: Any) -> Tensor:
        shapes.append(tuple(grad.shape))
        return inner(grad, *args)

    _muon._zeropower_via_newtonschulz = count
    try:
        yield shapes
    finally:
        _muon._zeropower_via_newtonschulz = inner


def trained(
    plan: dict[str, Any] | None,
    size: int,
    kind: Any = optim.Muon,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> tuple[dict[str, Tensor], list[tuple[int, ...]]]:
    """Parameters and momenta after some steps, and what this rank has orthogonalised."""
    torch.manual_seed(0)
    model: Any = Net().to(dtype)
    if plan is not None:
        parallelize(model, ParallelPlan(world_size=size, **plan))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    optimizer = kind([{"params": matrices[::2], "lr": 0.02}, {"params": matrices[1::2]}], lr=0.01, **options)
    with counted() as shapes:
        for step in range(STEPS):
            generator = seeded(step)
            optimizer.zero_grad()
            model(torch.randn(4, WIDTH, generator=generator, dtype=torch.float64).to(dtype)).backward()
            optimizer.step()
    values = dict(model.named_parameters())
    for name, p in model.named_parameters():
        if p in optimizer.state:
            values[f"{name}/momentum"] = optimizer.state[p]["momentum_buffer"]
    return {
        n: x.full_tensor() if hasattr(x, "full_tensor") else x.detach() for n, x in values.items()
    }, shapes


def distances(a: dict[str, Tensor], b: dict[str, Tensor]) -> dict[str, float]:
    assert a.keys() == b.keys()
    return {n: float((a[n] - x).abs().max() / x.abs().max()) for n, x in b.items()}


def against_one_device(rank: int, size: int, layout: str, kind: Any = optim.Muon, **options: Any) -> Any:
    exact, shapes = trained(None, 1, kind, **options)
    values, mine = trained(PLANS[layout], size, kind, **options)
    return max(distances(values, exact).values()), mine, shapes


@pytest.mark.parametrize(
    "layout",
    [n if n in ("tp2-zero2", "owners-tp2-2") else pytest.param(n, marks=pytest.mark.slow) for n in PLANS],
)
def test_each_matrix_is_computed_on_one_rank_as_on_one_device(rank_pool: RankPool, layout: str) -> None:
    """In double precision, so that gradients round to the same bfloat16 numbers."""
    size = 4 if "-" in layout else 2
    results = rank_pool.run(size, against_one_device, layout)
    assert max(distance for distance, _, _ in results) < 1e-10
    once = Counter(results[0][2])
    assert once.total() == 9 * STEPS
    assert sum((Counter(mine) for _, mine, _ in results), Counter()) == once
    # products of two numbers: no rank has much more than its part
    loads = [sum(m * n * min(m, n) for m, n in mine) for _, mine, _ in results]
    assert max(loads) <= 1.35 * sum(loads) / size


@pytest.mark.slow
def test_a_subclass_computes_each_matrix_on_all_ranks(rank_pool: RankPool) -> None:
    """The control of what is counted."""
    results = rank_pool.run(2, against_one_device, "zero2", Derived)
    assert all(Counter(mine) == Counter(shapes) for _, mine, shapes in results)


def bit_equal(rank: int, size: int, layout: str) -> list[bool]:
    """Copies are the same on all ranks, and momenta that torch scales in place are scaled."""
    actual = []
    for options in ({"nesterov": False}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}):
        for plan in (None, PLANS[layout]):
            torch.manual_seed(0)
            model: Any = Net().to(torch.bfloat16)
            if plan is not None:
                parallelize(model, ParallelPlan(world_size=size, **plan))
            matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
            optimizer = optim.Muon(matrices, lr=0.02, **options)
            for step in range(2):
                generator = seeded(step)
                for p in matrices:
                    p.grad = torch.randn(p.shape, generator=generator).to(torch.bfloat16)
                optimizer.step()
            values = [*matrices, *(optimizer.state[p]["momentum_buffer"] for p in matrices)]
            actual.append([x.full_tensor() if hasattr(x, "full_tensor") else x.detach() for x in values])
    return [
        torch.equal(a, b)
        for alone, many in (actual[:2], actual[2:])
        for a, b in zip(alone, many, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["dp2", "zero3"])
def test_bfloat16_parameters_are_bit_equal(rank_pool: RankPool, layout: str) -> None:
    for same in rank_pool.run(2, bit_equal, layout):
        assert len(same) == 36 and all(same)


def sent(rank: int, size: int, layout: str) -> Any:
    """Bytes that this rank gets, against those of all parameters in bfloat16."""
    torch.manual_seed(0)
    model: Any = parallelize(Net(), ParallelPlan(world_size=size, **PLANS[layout]))
    matrices = [p for p in model.parameters() if p.ndim == 2 and p.requires_grad]
    optimizer = optim.Muon(matrices)
    for p in matrices:
        p.grad = torch.ones(p.shape)
    with communication() as log:
        optimizer.step()
    return log.nbytes(), 2 * sum(p.numel() for p in matrices)


def test_a_step_has_two_collectives_along_an_axis(rank_pool: RankPool) -> None:
    results = rank_pool.run(2, sent, "zero2")
    assert all(nbytes.keys() == {("zero", "optimizer", "all_to_all")} for nbytes, _ in results)
    # to the owners and back, each time half of a matrix, in all; small matrices come back whole
    received = sum(sum(nbytes.values()) for nbytes, _ in results)
    assert received <= 1.02 * 2 * results[0][1] / 2


def test_a_step_of_matrices_with_owners_has_none(rank_pool: RankPool) -> None:
    assert all(not nbytes for nbytes, _ in rank_pool.run(2, sent, "owners3"))
