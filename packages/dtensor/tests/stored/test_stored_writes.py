"""Writes to stored DTensors and through their views, also with interval shards, and the values of a view."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from meshwright_dtensor import as_mesh_parameter, distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.sharding.boxes import read_region, region_of
from meshwright_dtensor.sharding.intervals import segmented_shard
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.writes import MeshView
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def in_runs(value, mesh):
    state = segmented_shard(0, (4, 4), mesh.size())
    local = read_region(
        value, region_of(value.shape, tuple(mesh.shape), mesh.get_coordinate(), (state,))
    ).clone()
    stored = DTensor.from_local(
        local, mesh, [Shard(0)], run_check=False, shape=value.shape, stride=value.stride()
    )
    return as_mesh_parameter(stored, (state,))


def parameters(mesh):
    """Parameters in different layouts, each with its value on one device."""
    value = torch.arange(24.0).view(8, 3)
    yield "rows", value.clone(), as_mesh_parameter(distribute_tensor(value, mesh, [Shard(0)]), (0,))
    yield "columns", value.clone(), as_mesh_parameter(distribute_tensor(value, mesh, [Shard(1)]), (1,))
    yield "whole", value.clone(), as_mesh_parameter(distribute_tensor(value, mesh, [Replicate()]), ("I",))
    if mesh.size() == 2:  # four rows divide evenly
        yield "runs", value.clone(), in_runs(value, mesh)


WRITES = {
    "row": lambda p: p[1].mul_(0),
    "column": lambda p: p[:, 1].add_(1),
    "transposed": lambda p: p.T[0].zero_(),
    "flat": lambda p: p.view(-1).__setitem__(5, -1.0),
    "index": lambda p: p.__setitem__((2, 1), 9.0),
    "data": lambda p: p.data.__setitem__(3, 1.0),
    "plain": lambda p: p.add_(torch.ones(8, 3)),
    "row of numbers": lambda p: p.data.mul_(torch.tensor([1.0, 2.0, 3.0])),
    "drawn": lambda p: p[2:5].normal_(),
    "data is": lambda p: setattr(p, "data", torch.full((8, 3), 2.0)),
    "orthogonal": nn.init.orthogonal_,
    "drawn like": lambda p: p.add_(torch.rand_like(p)),
}


def written(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    wrong = []
    for name, write in WRITES.items():
        for layout, plain, here in parameters(mesh):
            for tensor in (plain, here):
                torch.manual_seed(4)
                with torch.no_grad():
                    write(tensor)
            if not torch.equal(here.full_tensor(), plain):
                wrong.append((name, layout))
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_writes_reach_parameters(rank_pool: RankPool, world: int) -> None:
    # three ranks do not divide the rows
    for wrong in rank_pool.run(world, written):
        assert wrong == []


def read_views(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(12.0).view(4, 3)
    x = mesh_value(distribute_tensor(value, mesh, [Shard(0)]))
    row, column = x[1], x[:, 2]
    assert isinstance(row, MeshView) and isinstance(column, MeshView)
    x.mul_(2)
    # a view has the value of its base, copy or not
    assert torch.equal(row.full_tensor(), value[1] * 2) and torch.equal(column.full_tensor(), value[:, 2] * 2)
    assert float(row.sum()) == float(value[1].sum() * 2)
    assert torch.equal((row + 1).full_tensor(), value[1] * 2 + 1)
    assert torch.equal((row + torch.ones(3)).full_tensor(), value[1] * 2 + 1)
    g = distribute(torch.ones(3), mesh, ["I"])
    assert torch.equal((g * row).full_tensor(), value[1] * 2)
    # copies are no views
    for taken in (copy.deepcopy(row), row.clone(), row.redistribute(placements=[Replicate()])):
        assert not isinstance(taken, MeshView)
        assert torch.equal(taken.full_tensor(), value[1] * 2)
    file = io.BytesIO()
    torch.save(row, file)
    file.seek(0)
    assert torch.equal(torch.load(file), value[1] * 2)
    return True


def write_through_views(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(12.0).view(4, 3)
    x = mesh_value(distribute_tensor(value, mesh, [Shard(0)]))
    x.mul_(2)
    # an index that copies on one device copies here
    for chosen in (x[[0, 1]], x[torch.tensor([0, 1])], x.t().reshape(-1)):
        chosen.zero_()
    assert torch.equal(x.full_tensor(), value * 2)
    # elementwise writes, also through views that share memory, need no communication; others do
    with communication() as log:
        x.add_(value)
        x[:, 1].zero_()
    assert not log.counts()
    with communication() as log:
        x[0].zero_()
    assert log.counts()
    y = mesh_value(distribute_tensor(value, mesh, [Shard(0)]))
    assert type(y.detach()) is MeshValue and type(y.data) is MeshValue
    return True


def test_view_has_present_value_of_base(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, read_views))
    assert all(rank_pool.run(2, write_through_views))


def frozen(rank, world):
    """With gradients on: the view of a frozen parameter is computed with, and writes to it reach the parameter."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(12.0).view(4, 3)
    p = as_mesh_parameter(distribute_tensor(value, mesh, [Shard(0)]), (0,), requires_grad=False)
    x = distribute(torch.ones(2, 3), mesh, ["I"]).requires_grad_()
    row, turned = p[2], p.T
    ((x * row).sum() + (x @ turned).sum()).backward()
    assert torch.equal(x.grad.full_tensor(), (value[2] + value.sum(0)).expand(2, 3))
    row.zero_()
    turned[0].fill_(5)
    torch.add(torch.ones(3), 1, out=p[1])
    want = value.clone()
    want[2], want[:, 0], want[1] = 0, 5, 2
    assert torch.equal(p.full_tensor(), want)
    assert torch.equal(row.full_tensor(), want[2]) and torch.equal((turned * 1).full_tensor(), want.T)
    p[[0, 3]].zero_()  # advanced indexing copies
    assert torch.equal(p.full_tensor(), want)
    with pytest.raises(UnsupportedError, match=r"value\.detach\(\)"):
        p[0].copy_(torch.ones(3, requires_grad=True))
    return True


def test_views_of_frozen_parameters(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, frozen))


def turned(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(12.0).view(4, 3)
    x = distribute(value, mesh, [Shard(0)])
    assert x.t_() is x and x.shape == (3, 4) and torch.equal(x.full_tensor(), value.t())
    assert torch.equal((x * 2).full_tensor(), value.t() * 2)
    assert torch.equal(x.unsqueeze_(1).squeeze_(1).transpose_(0, 1).full_tensor(), value)
    return True


def test_in_place_shape_changes(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, turned))
