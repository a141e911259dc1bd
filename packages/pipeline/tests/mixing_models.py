"""Test models that mix rows, between or inside units, or write state; and models that do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor.plan import ParallelPlan, PipelineRule

WIDTH, ROWS = 6, 8
Change = Callable[[Tensor], Tensor]


def gram(x: Tensor) -> Tensor:
    return (x @ x.T / 4).softmax(-1) @ x


MIXING: dict[str, Change] = {
    "mean": lambda x: x - x.mean(0),
    "flip": lambda x: x.flip(0),
    "cumsum": lambda x: x.cumsum(0) / 4,
    "std": lambda x: x / (0.1 + x.std(0)),
    "roll": lambda x: x.roll(1, 0),
    "gram": gram,
    "largest": lambda x: x / x.abs().max(),
    "smallest": lambda x: x - x.min(),
    "first": lambda x: x - x[:1],
    "sorted": lambda x: x.sort(0).values,
    "number": lambda x: 4 * x / x.shape[0],
    "slightly": lambda x: x + 0.01 * x.sum(),
}
"""Functions in which rows interact."""


def each(x: Tensor) -> Tensor:
    """Expert by expert, like a mixture of experts."""
    made = torch.zeros_like(x)
    choice = x.argmax(-1)
    for expert in range(WIDTH):
        rows = (choice == expert).nonzero()[:, 0]
        made.index_add_(0, rows, x[rows] * (1 + expert / 7))
    return made


BY_ROW: dict[str, Change] = {
    "nothing": lambda x: x,
    "mean of a row": lambda x: x - x.mean(-1, keepdim=True),
    "flip of a row": lambda x: x.flip(1),
    "gram of a row": lambda x: ((x[:, :, None] @ x[:, None]).softmax(-1) @ x[:, :, None])[..., 0],
    "experts": each,
    "flattened": lambda x: (x.reshape(-1) * 1.5).reshape(-1, WIDTH),
    "in place": lambda x: x.clone().mul_(2).sub_(0.1),
    "turned": lambda x: (x.T * 0.5).T,
}
"""Batch-independent functions."""


class Block(nn.Module):
    def __init__(self, change: Change | None) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return x if self.change is None else self.change(x)


class Changed(nn.Module):
    """Blocks; `change` is applied inside of the second, or before it."""

    def __init__(self, change: Change, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(change if inside and i == 1 else None) for i in range(4))
        self.change = None if inside else change

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for place, layer in enumerate(self.layers):
            if place == 1 and self.change is not None:
                x = self.change(x)
            x = layer(x)
        return F.mse_loss(x, y)


def changed(change: Change, inside: bool) -> Changed:
    torch.manual_seed(0)
    return Changed(change, inside)


class Writer(nn.Linear):
    """A block that writes its own state."""

    def __init__(self, write: Callable[[Any, Tensor], Any]) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("load", torch.zeros(WIDTH, dtype=torch.long))
        self.calls, self.seen, self.cache = 0, list[float](), None
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(super().forward(x))
        with torch.no_grad():
            self.write(self, x)
        return x


def count(m: Writer, x: Tensor) -> None:
    m.calls += 1


def running(m: Writer, x: Tensor) -> None:
    m.mean = 0.9 * m.mean + 0.1 * x.mean(0)


def lazily(m: Writer, x: Tensor) -> None:
    if m.cache is None:
        m.cache = torch.linspace(0, 1, WIDTH)


WRITES: dict[str, tuple[str, Callable[[Any, Tensor], Any]]] = {
    "calls": ("calls", count),
    "running mean": ("mean", running),
    "running mean in place": ("mean", lambda m, x: m.mean.mul_(0.9).add_(0.1 * x.mean(0))),
    "mean of the batch": ("mean", lambda m, x: m.mean.copy_(x.mean(0))),
    "load": ("load", lambda m, x: m.load.add_(torch.bincount(x.argmax(-1), minlength=WIDTH))),
    "list": ("seen", lambda m, x: m.seen.append(float(x.mean()))),
}
"""Writes in a forward: name of the attribute, and function."""

KEEPS: dict[str, Callable[[Any, Tensor], Any]] = {
    "nothing": lambda m, x: None,
    "lazily": lazily,
    "shape": lambda m, x: setattr(m, "cache", x.shape[-1]),
    "last": lambda m, x: setattr(m, "cache", x.detach()),
    "constant": lambda m, x: m.mean.fill_(0.5) and None,
}
"""State that a second run does not change."""


class Writing(nn.Module):
    """Blocks of which the second writes state; or the model itself does."""

    def __init__(self, write: Callable[[Any, Tensor], Any], inside: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            Writer(write if inside and i == 1 else KEEPS["nothing"]) for i in range(4)
        )
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("load", torch.zeros(WIDTH, dtype=torch.long))
        self.calls, self.seen, self.cache = 0, list[float](), None
        self.write = None if inside else write

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.write is not None:
            self.write(self, x.detach())
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def writing(write: Callable[[Any, Tensor], Any], inside: bool = True) -> Writing:
    torch.manual_seed(0)
    return Writing(write, inside)


def batch(step: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "y")}


def plan(microbatches: int) -> ParallelPlan:
    stages = (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    rule = PipelineRule(stages=stages, microbatches=microbatches)
    return ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
