"""Small models for the tests of pipelines, and their plans."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright_dtensor.plan import ParallelPlan, PipelineRule

VOCABULARY, WIDTH, INNER, ROWS, TOKENS = 29, 8, 16, 8, 6


class Bomb(torch.autograd.Function):
    """Raises in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("boom backward")


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner, self.outer = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, INNER),
            nn.Linear(INNER, WIDTH),
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.25)  # models may write to their inputs in place
        return x + self.dropout(self.outer(torch.relu(self.inner(self.norm(x)))))


class Chain(nn.Module):
    """A decoder with a head tied to the embedding, a parameter outside of units, and code between units."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))
        self.drop = nn.Dropout(dropout)
        self.layers = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        x = self.drop(self.embed(ids) * self.scale)
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x) * self.scale)
        if labels is None:
            return {"logits": logits}
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Crossed(nn.Module):
    """Every decoder block uses the encoder's result and a bias from the first block: values that skip stages."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.start = nn.Linear(WIDTH, WIDTH)
        self.decoder = nn.ModuleList(nn.Bilinear(WIDTH, WIDTH, WIDTH) for _ in range(4))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.encoder:
            x = torch.tanh(layer(x))
        bias = self.start(y)
        for layer in self.decoder:
            y = torch.tanh(layer(x, y)) + bias
        return self.head(y + x).square().mean(), y


def chain_batch(
    step: int = 0, uneven: bool = False, rows: int = ROWS, tokens: int = TOKENS
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (rows, tokens), generator=generator)
    labels = ids.clone()
    if uneven:
        labels[0, 1:] = -100
        labels[2] = labels[3] = -100
    return {"ids": ids, "labels": labels}


def crossed_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {
        "x": torch.randn(ROWS, WIDTH, generator=generator),
        "y": torch.randn(ROWS, WIDTH, generator=generator),
    }


def chain_plan(ranks: int = 2, layers: int = 4, stages: int | None = None, **changes: Any) -> ParallelPlan:
    """Equal numbers of blocks for every stage."""
    count = stages or ranks
    each = layers // count
    parts = [[f"layers.{i}" for i in range(s * each, (s + 1) * each)] for s in range(count)]
    parts[0] = ["embed", "drop", *parts[0]]
    parts[-1] = [*parts[-1], "norm", "head"]
    rule: dict[str, Any] = {"stages": parts, "microbatches": 4} | changes
    return ParallelPlan(world_size=ranks, degrees={"pp": ranks}, pipeline=PipelineRule(**rule))


def crossed_plan(ranks: int = 4, **changes: Any) -> ParallelPlan:
    stages = [["encoder"], ["start", "decoder.0"], ["decoder.1"], ["decoder.[23]", "head"]]
    rule: dict[str, Any] = {"stages": stages, "microbatches": 4} | changes
    return ParallelPlan(world_size=ranks, degrees={"pp": ranks}, pipeline=PipelineRule(**rule))
