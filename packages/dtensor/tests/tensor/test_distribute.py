"""`distribute` without a mesh and by axis names; `Layout.inside`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import share_attention
from meshwright_dtensor.tensor.global_tensor import wrap
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool


def forms(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    x = torch.randn(7, 6)
    expected = distribute(x, mesh, [Shard(0), Shard(1)])
    with mesh:
        actual = [distribute(x, [Shard(0), Shard(1)]), distribute(x, {"tp": Shard(1), "dp": 0})]
        replicas = distribute(x, {"tp": Shard(1)})
    actual.append(distribute(x, placements=[Shard(0), Shard(1)], mesh=mesh))
    actual.append(distribute(replicas, {"dp": Shard(0), "tp": Shard(1)}))  # is on the mesh already
    for tensor in actual:
        assert tensor.global_layout == expected.global_layout
        assert torch.equal(tensor.to_local(), expected.to_local()) and torch.equal(tensor.full_tensor(), x)
    assert list(replicas.to_local().shape) == [7, 3]
    whole = distribute(x, [Shard(0)])  # no mesh around: all ranks are one axis
    assert whole.global_layout.context.sizes == (4,) and len(whole.to_local()) == (1 if rank == 3 else 2)
    assert torch.equal(distribute(x, {"tp": Replicate()}).to_local(), x)


def refusals(rank: int, world_size: int) -> None:
    mesh = init_device_mesh(device_type(), (2,), mesh_dim_names=("tp",))
    x = torch.randn(4, 6)
    with pytest.raises(UsageError, match="2 placements and no mesh"):
        distribute(x, [Shard(0), Shard(1)])
    with pytest.raises(UsageError, match="mesh axis 'pt'; the axes of the mesh are tp"):
        distribute(x, mesh, {"pt": Shard(0)})
    with pytest.raises(UsageError, match="no placements"):
        distribute(x, mesh)
    with pytest.raises(UsageError, match="no placements"):
        distribute(x)


def inside(rank: int, world_size: int) -> None:
    """The local part with respect to one axis is a global value on the other: the rows of one data rank."""
    mesh = init_device_mesh(device_type(), (2, 2), mesh_dim_names=("dp", "tp"))
    share_attention(mesh, "dp", "all_gather")  # has no effect on the other axis
    x = torch.randn(8, 6, generator=seeded(0))
    weight = torch.randn(3, 6, generator=seeded(1))
    for states in ([Shard(0), Shard(1)], [Shard(0), Shard(0)], [Shard(0), Replicate()]):
        t = distribute(x, mesh, states)
        layout = t.global_layout.inside([1])
        assert layout.context is t.global_layout.context.inner(("tp",)) and layout.context.axes == ("tp",)
        part = wrap(t.to_local(), layout)
        rows = x.chunk(2)[rank // 2]
        assert part.shape == rows.shape and torch.equal(part.full_tensor(), rows)
        assert torch.equal(part.sort(0).values.full_tensor(), rows.sort(0).values)
        torch.testing.assert_close(F.linear(part, weight).full_tensor(), F.linear(rows, weight))
    assert layout.context.report is t.global_layout.context.report


def test_inside(rank_pool: RankPool) -> None:
    rank_pool.run(4, inside)


def test_forms(rank_pool: RankPool) -> None:
    rank_pool.run(4, forms)


def test_refusals(rank_pool: RankPool) -> None:
    rank_pool.run(2, refusals)
