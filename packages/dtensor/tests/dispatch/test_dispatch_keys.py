"""What an exception inside of a trace leaves in torch's state of the thread is undone."""

from __future__ import annotations

import contextlib

import torch
import torch.autograd.forward_ad as forward_ad
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def keys_after_a_failed_trace(rank: int, world: int) -> None:
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("a",))
    before = str(torch._C._dispatch_tls_local_exclude_set())
    with contextlib.suppress(RuntimeError), forward_ad.dual_level():
        # torch's own meta function raises, with most dispatch keys excluded
        torch.quantile(distribute(torch.randn(4, 6), mesh, [0]), torch.tensor([0.3]), dim=1)
    assert str(torch._C._dispatch_tls_local_exclude_set()) == before
    x = torch.ones(8, requires_grad=True)
    total = (distribute(x, mesh, [0]) + 3).sum()
    total.backward()
    assert total.item() == 32
    assert x.grad is not None and x.grad.tolist() == [1.0] * 8


def test_a_failed_trace_leaves_no_dispatch_keys(rank_pool: RankPool) -> None:
    rank_pool.run(2, keys_after_a_failed_trace)
