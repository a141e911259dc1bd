"""A model that checkpoints a part of its forward: the second run has the planned layouts too."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.plan import ActivationRule, ParallelPlan, ParameterRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.module_stack import FRAMES
from meshwright_parallel import parallelize
from meshwright_parallel.verification.compare import compare

WIDTH = 8


class Block(nn.Module):
    """Torch calls inside and outside of the checkpointed part, one function twice; hooks are outside of it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.up, self.dropout = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(x)
        return checkpoint(self.work, x, use_reentrant=self.reentrant) + x  # type: ignore[no-any-return]

    def work(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.dropout(torch.tanh(x) * 2.0).exp())


class Stack(nn.Module):
    """Two such blocks."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(reentrant) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return (x**2).mean()


def _step(rank: int, world_size: int, reentrant: bool) -> list[str]:
    rows = ActivationRule(module="blocks.*", function="tanh", occurrence=1, inputs=({"tp": "S(0)"},))
    plan = ParallelPlan(
        world_size=2,
        degrees={"dp": 1, "tp": 2},
        parameters=(ParameterRule(pattern="*.up.*", placement={"tp": "S(0)"}),),
        activations=(rows,),
    )
    torch.manual_seed(0)
    single = Stack(reentrant)
    many = parallelize(copy.deepcopy(single), plan)
    batch = torch.randn(4, WIDTH)
    for model in (single, many):
        torch.manual_seed(1)
        model(batch.clone().requires_grad_()).backward(retain_graph=not reentrant)
    assert not FRAMES.stack
    gradients = [{n: p.grad for n, p in model.named_parameters()} for model in (single, many)]
    return [
        f"{c.name} {c.relative:.1e} {c.note}" for c in compare(0, "gradient", *gradients, None) if not c.ok
    ]


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [False, True])
def test_user_checkpoint_recomputes_with_the_planned_layouts(rank_pool: RankPool, reentrant: bool) -> None:
    assert rank_pool.run(2, _step, reentrant) == [[], []]
