"""Values that a later stage is given and does not use: the parameters that they come from have no gradient, as on one device."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from pipe_models import ROWS, VOCABULARY, WIDTH, chain_batch
from torch import Tensor, nn

from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline


class Block(nn.Module):
    """Uses the memory where the first row says so."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.cross = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, memory: Tensor, used: Tensor) -> Tensor:
        x = x + torch.tanh(self.inner(x))
        return x + self.cross(memory) if bool(used[0] > 0) else x


class WithMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.memory, self.embed = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor, used: Tensor) -> Tensor:
        memory, x = self.memory(ids), self.embed(ids)
        for layer in self.layers:
            x = layer(x, memory, used)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def step(rank: int, size: int, schedule: str, used: list[int]) -> tuple[bool, float, bool]:
    """Whether the memory has a gradient on one device; the largest distance of a gradient; whether there are as many."""
    stages: tuple[list[str], ...] = (["memory", "embed", "layers.[01]"], ["layers.[23]", "head"])
    if schedule == "interleaved":
        stages = (["memory", "embed", "layers.0"], ["layers.1"], ["layers.2"], ["layers.3", "head"])
    rule = PipelineRule(stages=stages, microbatches=4, schedule=schedule)
    models = []
    for parallel in (False, True):
        torch.manual_seed(0)
        plan = ParallelPlan(world_size=2, degrees={"pp": 2}, pipeline=rule)
        models.append(pipeline(WithMemory(), plan) if parallel else WithMemory())
        rows = torch.tensor(used).repeat_interleave(ROWS // 4)
        if parallel:
            models[-1](**chain_batch(), used=rows).backward()
        else:
            for part in range(4):
                mine = {k: v.chunk(4)[part] for k, v in {**chain_batch(), "used": rows}.items()}
                count = (mine["labels"] != -100).sum() / (chain_batch()["labels"] != -100).sum()
                (models[-1](**mine) * count).backward()
    single, many = (dict(model.named_parameters()) for model in models)
    far, alike = 0.0, True
    for name, p in many.items():
        expected = single[name].grad
        alike = alike and (p.grad is None) == (expected is None)
        if p.grad is not None and expected is not None:
            far = max(far, float((p.grad - expected).abs().max() / expected.abs().max()))
    return single["memory.weight"].grad is not None, far, alike


@pytest.mark.parametrize(
    ("schedule", "used"),
    [
        ("1f1b", [0, 0, 0, 0]),
        ("1f1b", [0, 0, 1, 0]),
        ("zero-bubble", [0, 0, 1, 0]),
        ("interleaved", [1, 1, 0, 0]),
    ],
)
def test_gradients_are_there_where_one_device_has_them(
    rank_pool: RankPool, schedule: str, used: list[int]
) -> None:
    for has, far, alike in rank_pool.run(2, step, schedule, used):
        assert has == any(used) and far < 1e-5 and alike
