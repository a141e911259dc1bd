"""Pipelines of models in which modules call each other's: a bias given to all blocks, one activation object for all."""

from __future__ import annotations

import torch
from plan_once import one_and_many
from torch import Tensor, nn

from meshwright_dtensor.testing.rank_pool import RankPool


class Bias(nn.Module):
    """A bias for each position, which blocks are given and call."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(16, 8)

    def forward(self, length: int) -> Tensor:
        result: Tensor = self.emb(torch.arange(length))
        return result


class Block(nn.Module):
    """A layer and an activation, which is the same object in all blocks."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm, self.activation = nn.Linear(8, 8), nn.LayerNorm(8), activation

    def forward(self, x: Tensor, bias: Bias) -> Tensor:
        h: Tensor = self.activation(self.linear(x) * bias(x.shape[1]))
        result: Tensor = x + self.norm(h)
        return result


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias, activation = Bias(), nn.ReLU()
        self.layers = nn.ModuleList(Block(activation) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.bias)
        return x.square().mean()


def compare(rank: int, size: int) -> dict[str, float]:
    """Name -> distance of the loss and of every gradient from one device."""
    x = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(1))
    single, parallel = one_and_many(Blocks, x, pp=2, dp=1, microbatches=2)
    losses = [model(x) for model in (single, parallel)]
    for loss in losses:
        loss.backward()
    distances = {"loss": float(losses[0] - losses[1])}
    gradients = {name: p.grad.full_tensor() for name, p in parallel.named_parameters()}
    for name, p in single.named_parameters():
        distances[name] = float((p.grad - gradients[name]).abs().max() / p.grad.abs().max())
    return distances


def test_a_module_that_others_call_is_run_where_they_are(rank_pool: RankPool) -> None:
    for distances in rank_pool.run(2, compare):
        assert all(abs(distance) < 1e-5 for distance in distances.values()), distances
