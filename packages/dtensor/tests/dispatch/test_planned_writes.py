"""What is written in place stays as it lies, whatever a plan wants it in: its later readers see the write, and gradients too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor import distribute
from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.module_stack import install_frames


class Jitter(nn.Module):
    """Scales in place what it made; `h`, and not what the write returns, is read afterwards."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        h.mul_(by)
        return h.square().sum() + h.sum()


def written(rank: int, world: int, lies: Any, wanted: Any) -> None:
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    numbers = torch.Generator().manual_seed(1)
    values, by = torch.randn(5, 4, generator=numbers), torch.randn(5, 4, generator=numbers)
    alone = values.clone().requires_grad_()
    block = Jitter()
    loss = block(alone, by)
    loss.backward()
    x = distribute(values.clone(), mesh, [lies]).detach().requires_grad_()
    handles = install_frames(
        nn.ModuleDict({"block": block}), {"block": {"mul_": {0: Target(((("tp", wanted),),))}}}
    )
    there = block(x, distribute(by, mesh, ["I"]))
    there.backward()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(there.full_tensor(), loss)
    assert x.grad is not None and alone.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), alone.grad)


@pytest.mark.parametrize("lies, wanted", [("I", "X"), ("I", 0), (0, 1), (0, "I"), (1, "X")])
def test_a_plan_moves_nothing_that_is_written(rank_pool: RankPool, lies: Any, wanted: Any) -> None:
    rank_pool.run(2, written, lies, wanted)
