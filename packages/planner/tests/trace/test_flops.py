"""Operations of products, forward and backward, against torch's counter in a real run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from operations import BOOK, counted, planned
from planner_models import DGX_H100, LAPTOP_CPU, DataLike, Mlp, Transformer, host_of, tokens
from torch import nn

from meshwright_dtensor.strategy import Link, PlanRequest, SearchRequest, StrategyCost
from meshwright_planner import EagerPlanner
from meshwright_planner.cost.prices import AxisCosts, work_of
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record


class Open(nn.Module):
    """Attention in which every token sees all: torch counts the halves that a causal mask leaves out, we do not."""

    def __init__(self, frozen: str = "") -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(24, 24) for _ in "qkv")
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (f(x).view(2, 10, 3, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, stride=2), nn.Conv2d(8, 4, 3, padding=1, bias=False)
        self.back = nn.ConvTranspose2d(4, 2, 2, stride=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(F.relu(self.second(F.relu(self.first(x)))))


class Products(nn.Module):
    """Products that are no layers, with a summand that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Parameter(torch.randn(6, 6)) for _ in "abc")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.c, x, self.a) @ self.b + torch.addmm(self.c, self.a, self.a)


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Mlp(), Batch.of(torch.randn(4, 7, 64))),  # the input gets no gradient: its layer goes back once
        (nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), Batch.of(torch.randn(5, 8))),
        (Open(), Batch.of(torch.randn(2, 10, 24))),
        *((Open(names), Batch.of(torch.randn(2, 10, 24))) for names in ("q", "k", "v", "qk", "qv", "kv")),
        (Convolutions(), Batch.of(torch.randn(2, 3, 17, 17))),
        (Products(), Batch.of(torch.randn(6, 6))),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, nn.Module) else "",
)
def test_flops_equal_those_of_torch(model: nn.Module, batch: Batch) -> None:
    assert planned(model, batch) == counted(model, batch)


def test_causal_attention_has_half_the_flops_of_torch() -> None:
    model, batch = Transformer(layers=2, hidden=64, heads=8), Batch.of(tokens(2, 32))
    halves = 2 * 2.0 * 2 * 32 * 32 * 2 * 64 / 2  # of both layers, the products that a mask leaves out
    forward, back = planned(model, batch)
    assert (forward + halves, back + 2 * halves) == counted(model, batch)


class Asking(DataLike):
    """Keeps its requests."""

    requests: ClassVar[list[SearchRequest]] = []

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [2]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        self.requests.append(request)
        return super().cost(request, degree, link)


@pytest.mark.parametrize("recompute", [None, "full"])
def test_strategies_get_the_flops_of_a_rank(recompute: str | None) -> None:
    Asking.requests.clear()
    model = Transformer(layers=2)
    request = PlanRequest(cluster=LAPTOP_CPU, world_size=2, recompute=recompute)
    EagerPlanner(host_of(Asking)).plan(model, tokens(4, 32), request)
    forward, back = planned(model, Batch.of(tokens(2, 32)))
    again, _ = planned(model.layers[0], Batch.of(torch.randn(2, 32, 64)))
    again -= 2.0 * (2 * 32) * 256 * 64  # the product that a layer ends with does not run again
    expected = forward + back + (2 * again if recompute else 0.0)
    assert (
        min(r.sizes.flops for r in Asking.requests) == expected
    )  # where it is open, recomputation is tried too


def test_bias_does_not_lengthen_the_backward_product() -> None:
    costs = AxisCosts(DGX_H100, DGX_H100.link(1, 1), 1)
    seconds = []
    for bias in (False, True):
        with torch.device("meta"):
            model, x = nn.Linear(4096, 4096, bias=bias), torch.empty(8192, 4096)
        tape = record(model, Batch.of(x), BOOK.composites)
        (node,) = tape.nodes
        work = work_of(node, tape.values, tape.flows[0], 2.0 * 8192 * 4096**2)
        states = [("I",) * len(refs) for refs in (node.ins, node.outs)]
        assert work.inputs_back == 1
        seconds.append(costs.compute(work, node, tape.values, *states))
    assert seconds[1] == pytest.approx(seconds[0], rel=1e-3)


def test_forward_fraction_follows_the_number_of_gradients() -> None:
    """Of a frozen layer half of the time, or all where no gradient flows through it."""

    def parts(trained: str) -> tuple[float, float]:
        with torch.device("meta"):
            # products of one shape in all directions
            layers = [nn.Linear(4096, 4096, bias=False) for _ in range(3)]
            model, x = nn.Sequential(*layers), torch.empty(4096, 4096)
        for name, p in model.named_parameters():
            p.requires_grad_(name.partition(".")[0] in trained)
        plan = EagerPlanner(host_of()).plan(model, (x,), PlanRequest(cluster=DGX_H100, world_size=1))[0]
        assert plan.predicted is not None and plan.predicted.split is not None
        (stage,) = plan.predicted.split.stages
        return stage.forward_seconds, stage.backward_seconds

    once = parts("012")[0] / 3
    assert parts("012") == pytest.approx((3 * once, 5 * once))  # the input gets no gradient
    assert parts("0") == pytest.approx((3 * once, 3 * once))
    assert parts("2") == pytest.approx((3 * once, once))
