"""Plain models for the planner's tests, and strategies to plan with when no other distribution is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, StrategySpec
from meshwright_dtensor.plugins.host import Registered
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import (
    CollectiveUse,
    Link,
    PlanRequest,
    SearchRequest,
    Strategy,
    StrategyCost,
    divisors,
)
from meshwright_planner import EagerPlanner, ManualPlanner
from meshwright_planner.clusters.registry import DGX_H100, LAPTOP_CPU


class Mlp(nn.Module):
    def __init__(self, hidden: int = 64, inner: int = 256) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, inner)
        self.down = nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Attention(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        for name in ("q", "k", "v", "o"):
            self.add_module(name, nn.Linear(hidden, hidden, bias=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, h = x.shape
        q, k, v = (f(x).view(b, s, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).reshape(b, s, h))


class Block(nn.Module):
    def __init__(self, hidden: int = 64, heads: int = 8) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), Mlp(hidden, 4 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A language model with its loss."""

    def __init__(
        self,
        vocab: int = 512,
        hidden: int = 64,
        layers: int = 3,
        heads: int = 8,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embed(ids))
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def tokens(rows: int = 2, length: int = 32, vocab: int = 512) -> dict[str, torch.Tensor]:
    return {"ids": torch.randint(vocab, (rows, length)), "labels": torch.randint(vocab, (rows, length))}


class DataLike(Strategy):
    name: ClassVar[str] = "data"
    axis: ClassVar[str] = "dp"
    order: ClassVar[int] = 10

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return [d for d in divisors(request.world_size) if request.batch_size % d == 0]

    def batch_factor(self, degree: int) -> int:
        return degree

    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        return 0 if shape and shape[0] == batch_size else "I"

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        seconds = link.seconds("all_reduce", request.sizes.gradient_bytes, degree)
        use = CollectiveUse("all_reduce", request.sizes.gradient_bytes, why="gradients")
        exposed = max(0.1 * seconds, seconds - request.step.backward_seconds)
        return StrategyCost(exposed_seconds=exposed, overlapped_seconds=seconds - exposed, collectives=(use,))


class TensorLike(Strategy):
    name: ClassVar[str] = "tensor"
    axis: ClassVar[str] = "tp"
    order: ClassVar[int] = 40
    placement_search: ClassVar[bool] = True

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        return divisors(request.world_size)


def host_of(*strategies: type[Strategy]) -> PluginHost:
    records = {
        s.name: Registered(
            StrategySpec(name=s.name, axis=s.axis, target=f"{s.__module__}:{s.__qualname__}"),
            "tests",
            "0",
            "tests",
        )
        for s in strategies
    }
    return PluginHost({StrategySpec: records})


HOST = host_of(DataLike, TensorLike)


def eager() -> EagerPlanner:
    return EagerPlanner(HOST)


def manual() -> ManualPlanner:
    return ManualPlanner(HOST)


def best(model: nn.Module, batch: Any, **options: Any) -> ParallelPlan:
    """The first plan of the search, on the laptop where no other cluster is asked for."""
    options = {"cluster": LAPTOP_CPU, **options}
    return eager().plan(model, batch, PlanRequest(**options))[0]


__all__ = ["DGX_H100", "LAPTOP_CPU"]
