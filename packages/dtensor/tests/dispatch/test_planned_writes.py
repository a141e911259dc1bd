"""A tensor that is written in place keeps its layout, whatever the plan wants: readers and gradients see the write."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor import distribute
from meshwright_dtensor.dispatch.planned_calls import Target
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.module_stack import install_frames


class Jitter(nn.Module):
    """Scales `h` in place and reads `h`, not the result of the write."""

    def forward(self, x: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
        h = x.sin()
        h.mul_(by)
        return h.square().sum() + h.sum()


def written(rank: int, world: int, stored: Any, wanted: Any) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    numbers = seeded(1)
    values, by = torch.randn(5, 4, generator=numbers), torch.randn(5, 4, generator=numbers)
    alone = values.clone().requires_grad_()
    block = Jitter()
    loss = block(alone, by)
    loss.backward()
    x = distribute(values.clone(), mesh, [stored]).detach().requires_grad_()
    planned = {0: Target(((("tp", wanted),),))}
    targets = {None: {"mul_": planned, "square": planned}}
    handles = install_frames(nn.ModuleDict({"block": block}), {"block": targets})
    there = block(x, distribute(by, mesh, ["I"]))
    there.backward()
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(there.full_tensor(), loss)
    assert x.grad is not None and alone.grad is not None
    torch.testing.assert_close(x.grad.full_tensor(), alone.grad)


# a dim that the tensor does not have: the plan means another call
@pytest.mark.parametrize("stored, wanted", [("I", "X"), ("I", 0), (0, 1), (0, "I"), (1, "X"), (0, 2)])
def test_planned_target_does_not_move_written_tensor(rank_pool: RankPool, stored: Any, wanted: Any) -> None:
    rank_pool.run(2, written, stored, wanted)
