"""Values written in place are planned to keep their layout, as the core executes them: planned bytes are executed bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import auto_parallelize

WIDTH, ROWS = 16, 16


class Written(nn.Module):
    """Two products, and an operation that writes in place between or after them."""

    def __init__(self, operation: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.operation = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH), operation

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(self, x)


def added(model: Written, x: Tensor) -> Tensor:
    y = model.down(model.up(x))
    y.add_(x)
    return y.tanh().square().mean() + y.mean()


def summed(model: Written, x: Tensor) -> Tensor:
    h = model.up(x)
    total = torch.zeros_like(model.down(h))
    for i in range(3):
        total += model.down(h * i)
    return total.square().mean()


def gated(model: Written, x: Tensor) -> Tensor:
    h = model.up(x)
    gate = torch.sigmoid(2 * h)
    h = h.sin()
    h.mul_(gate)
    return model.down(h).square().mean() + h.mean()


def part(model: Written, x: Tensor) -> Tensor:
    """What is computed goes to a part of what was computed before."""
    h = model.up(x).clone()
    h[..., :24] = h[..., 24:48] * 3
    return model.down(h).square().mean()


def other(model: Written, x: Tensor) -> Tensor:
    """A product goes to a part of what another product made."""
    h = model.up(x) * 1.0
    y = torch.cat([x, model.down(h)], -1)
    y[..., :WIDTH] = model.down(h.tanh())
    return y.square().mean()


def view(model: Written, x: Tensor) -> Tensor:
    h = model.up(x).view(-1, 4, 16)
    h[:, 0].zero_()
    return model.down(h.flatten(1)).square().mean()


def clamped(model: Written, x: Tensor) -> Tensor:
    h = model.up(x) * 1.0
    h[:, :3].clamp_(min=0)
    return model.down(h).square().mean()


def constant(model: Written, x: Tensor) -> Tensor:
    h = model.up(x) * 1.0
    h[:, 3] = 0.0
    return model.down(h).square().mean()


def increased(model: Written, x: Tensor) -> Tensor:
    y = model.down(model.up(x))
    y[:, :3] += 1
    y[:, 5:8] *= x[:, :3]
    return y.square().mean()


def row(model: Written, x: Tensor) -> Tensor:
    h = model.up(x) * 1.0
    h[3] = h[10] * 2
    return model.down(h).square().mean()


def seen(model: Written, x: Tensor) -> Tensor:
    """A view that was taken before shows what is written to all of it."""
    h = model.up(x) * 1.0
    first = h[:, :16]
    h.mul_(0.5)
    return model.down(h).square().mean() + first.mean()


def freed(model: Written, x: Tensor) -> Tensor:
    """A view that only its writer's readers see."""
    h = model.up(x) * 1.0
    first = h[:, :16]
    first.relu_()
    return first.square().mean() + model.down(h).square().mean()


CASES = (added, summed, gated, part, other, view, clamped, constant, increased, row, seen, freed)
MODELS = {case.__name__: case for case in CASES}


def step(rank: int, size: int, name: str) -> tuple[float, Counter[str], Counter[str]]:
    """How far from one device, what is planned, what is communicated."""
    torch.manual_seed(0)
    alone = Written(MODELS[name])
    torch.manual_seed(0)
    model = Written(MODELS[name])
    x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))
    expected = alone(x)
    expected.backward()
    auto_parallelize(model, x, cluster="laptop-cpu", tp=2)
    with communication() as log:
        loss = model(x)
        loss.backward()
    worst = abs(float(loss.detach().full_tensor() - expected.detach()))
    for parameter, single_parameter in zip(model.parameters(), alone.parameters(), strict=True):
        worst = max(worst, float((parameter.grad.full_tensor() - single_parameter.grad).abs().max()))  # type: ignore[union-attr]
    planned, sent = Counter[str](), Counter[str]()
    for use in model.parallel_plan.collectives:
        planned[f"{use.phase} {use.kind}"] += use.nbytes * use.count
    for event in log.events:
        if event.nbytes > 16:  # sums of numbers are in no plan
            sent[f"{event.phase} {event.kind}"] += event.nbytes
    return worst, planned, sent


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_is_planned_is_communicated(rank_pool: RankPool, name: str) -> None:
    for worst, planned, sent in rank_pool.run(2, step, name):
        assert worst < 1e-5
        assert planned == sent
