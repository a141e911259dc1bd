"""Parameters with an interval shard: values go in and out in true order; functions of the permuted order raise."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from meshwright_dtensor import (
    RunShard,
    as_mesh_parameter,
    canonical,
    distribute,
    from_local,
    like_parameter,
    mark_sharding,
)
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.random import Part, run_random
from meshwright_dtensor.sharding.boxes import read_region, region_of
from meshwright_dtensor.sharding.intervals import segmented_shard, single_owner_shard, zigzag_shard
from meshwright_dtensor.stored.mesh_value import MeshValue
from meshwright_dtensor.stored.permuted import PermutedDTensor, install_true_order
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool


def parameter(value, mesh, state):
    coords = [mesh.get_local_rank(i) for i in range(mesh.ndim)]
    local = read_region(value, region_of(value.shape, tuple(mesh.shape), coords, (state,))).clone()
    spec = [Shard(int(state))] if isinstance(state, int) else [Replicate()]
    stored = DTensor.from_local(local, mesh, spec, run_check=False, shape=value.shape, stride=value.stride())
    return as_mesh_parameter(stored, (state,))


def model_of(value, mesh, state):
    model = nn.Linear(value.shape[1], value.shape[0], bias=False)
    model.weight = parameter(value, mesh, state)
    install_true_order(model)
    return model


def exits(rank, world, which):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    value = torch.randn(8 * world, 5)
    size = 8 * world
    makers = {
        "parts": lambda: segmented_shard(0, (6 * world, 2 * world), world),
        "single_owner_shard": lambda: single_owner_shard(0, size, world, 1),
    }
    state = makers.get(which, lambda: zigzag_shard(0, size, world))()
    model = model_of(value, mesh, state)
    p = model.weight
    copies = (p, p.detach(), copy.deepcopy(p), p.data, canonical(p))
    assert all(torch.equal(c.full_tensor(), value) for c in copies)
    assert torch.equal(p.redistribute(placements=[Replicate()]).to_local(), value)
    assert torch.equal(p.redistribute(placements=[Shard(1)]).full_tensor(), value)
    assert "S(0;" in repr(p) and p.placements == (Shard(0),) and p.global_layout.states == (state,)
    held = model.state_dict()["weight"]
    assert type(held) is MeshValue and torch.equal(held.full_tensor(), value)
    assert torch.equal(
        held.to_local(), value.chunk(world)[rank]
    )  # plain chunks: what a checkpoint may save as it is
    assert torch.equal(model.state_dict(keep_vars=True)["weight"].full_tensor(), value)
    # gradients
    x = distribute(torch.randn(3, 5), mesh, ["I"])
    (x @ p.t()).square().sum().backward()
    leaf = value.clone().requires_grad_()
    (x.full_tensor() @ leaf.t()).square().sum().backward()
    assert torch.allclose(p.grad.full_tensor(), leaf.grad, rtol=1e-5, atol=1e-5)
    assert torch.allclose((p.grad * 2).full_tensor(), leaf.grad * 2, rtol=1e-5, atol=1e-4)
    p.grad = leaf.grad
    assert torch.equal(p.grad.full_tensor(), leaf.grad)
    p.grad = canonical(p.grad)
    assert torch.equal(p.grad.full_tensor(), leaf.grad) and isinstance(p.grad, PermutedDTensor)
    # ways in: a global value, a DTensor in true order
    other = torch.randn_like(value)
    model.load_state_dict({"weight": other})
    assert torch.equal(p.full_tensor(), other)
    model.load_state_dict({"weight": held})
    assert torch.equal(p.full_tensor(), value)
    again = model_of(torch.zeros_like(value), mesh, state)
    again.load_state_dict(model.state_dict())
    assert torch.equal(again.weight.to_local(), p.to_local())
    return True


@pytest.mark.parametrize("which", ["parts", "single_owner_shard", "zigzag"])
def test_state_dicts_and_values_are_in_true_order(rank_pool: RankPool, which):
    assert all(rank_pool.run(2, exits, which))


def test_three_ranks(rank_pool: RankPool):
    assert all(rank_pool.run(3, exits, "parts"))


def training(rank, world, kind, foreach):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    value, x = torch.randn(12, 6), torch.randn(4, 6)
    model, single = model_of(value, mesh, segmented_shard(0, (4, 8), world)), nn.Linear(6, 12, bias=False)
    single.weight = nn.Parameter(value.clone())
    make = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
    options = {"momentum": 0.9} if kind == "sgd" else {}
    ours, theirs = (make(m.parameters(), lr=0.1, foreach=foreach, **options) for m in (model, single))
    for _ in range(3):
        for m, o in ((model, ours), (single, theirs)):
            o.zero_grad()
            data = distribute(x, mesh, ["I"]) if m is model else x
            m(data).square().mean().backward()
            o.step()
    assert torch.allclose(model.weight.full_tensor(), single.weight, rtol=1e-5, atol=1e-6)
    for key, state in theirs.state[single.weight].items():
        mesh_state = ours.state[model.weight][key]
        if torch.is_tensor(state) and state.dim():
            # every optimizer state can be given in true order
            plain = canonical(mesh_state, model.weight)
            assert type(plain) is DTensor
            assert torch.allclose(plain.full_tensor(), state, rtol=1e-5, atol=1e-6)
            back = like_parameter(plain, model.weight)
            assert torch.equal(back.to_local(), mesh_state.to_local()) and isinstance(back, PermutedDTensor)
            assert torch.equal(
                like_parameter(plain.full_tensor(), model.weight).to_local(), mesh_state.to_local()
            )
    return True


@pytest.mark.parametrize(("kind", "foreach"), [("adamw", False), ("adamw", True), ("sgd", False)])
def test_stock_optimizers(rank_pool: RankPool, kind, foreach):
    assert all(rank_pool.run(2, training, kind, foreach))


def refusals(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(16.0).view(8, 2)
    p = parameter(value, mesh, segmented_shard(0, (4, 4), world))
    held = p.detach()
    plain = canonical(held)
    with torch.no_grad():
        assert torch.equal((held * 2 + held).full_tensor(), value * 3)
        assert float(held.sum().full_tensor()) == float(value.sum())
        assert torch.equal(held.bfloat16().full_tensor(), value.bfloat16())
        for function in (
            lambda x: x.t(),
            lambda x: x[0],
            lambda x: x @ x.t(),
            lambda x: x.flip(0),
            lambda x: x.sum(1),
        ):
            assert torch.equal(function(held).full_tensor(), function(value))
        assert torch.equal((held + plain).full_tensor(), value * 2)
        assert torch.equal(held.add_(plain).full_tensor(), value * 2)
        torch._foreach_add_([held], [plain])
        assert torch.equal(held.full_tensor(), value * 3)
    with pytest.raises(UnsupportedError, match="leave a gap"):
        RunShard(0, [[(0, 2)], [(3, 2)]])
    with pytest.raises(UnsupportedError, match="does not fit dim 0 of size 6"):
        distribute(torch.zeros(6, 2), mesh, [RunShard.parts(0, (4, 4), world)])
    # plain chunks, but of another size of the dim or of another number of ranks
    chunks = distribute(torch.zeros(4, 2), mesh, [RunShard(0, [[(0, 2)], [(2, 2)]])])
    assert chunks.placements == (Shard(0),)
    for ranks in ([[(0, 2)], [(2, 2)]], [[(0, 2)], [(2, 2)], [(4, 2)]]):
        with pytest.raises(UsageError, match=r"owns . elements on . ranks, the dim has 10 on 2"):
            distribute(torch.zeros(10, 2), mesh, [RunShard(0, ranks)])
    with pytest.raises(UsageError, match=r"use Shard\(0\)"):
        mark_sharding(torch.nn.Parameter(torch.zeros(10, 2)), {"tp": RunShard(0, [[(0, 2)], [(2, 2)]])})
    return True


def test_functions_of_permuted_order_are_rejected(rank_pool: RankPool):
    assert all(rank_pool.run(2, refusals))


def placements(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("cp",))
    value = torch.arange(3 * 8.0).view(3, 8)
    x = distribute(value, mesh, [RunShard.zigzag(-1, 8, world)])
    assert x.placements == (RunShard.zigzag(1, 8, world),)
    assert torch.equal(x.to_local(), value[:, [0, 1, 6, 7] if rank == 0 else [2, 3, 4, 5]])
    assert torch.equal(x.full_tensor(), value)
    y = x.redistribute([RunShard.owned(1, 8, world, 1)])
    assert y.to_local().shape == (3, 8 * rank) and torch.equal(y.full_tensor(), value)
    assert torch.equal(from_local(y.to_local(), mesh, y.placements, (3, 8)).full_tensor(), value)
    # the numbers of one device, drawn into runs
    torch.manual_seed(5)
    drawn = run_random(
        torch.ops.aten.normal_.default,
        [x.to_local().clone()],
        {},
        [Part((3, 8), (0, 1), x.global_layout.region)],
    )
    torch.manual_seed(5)
    assert torch.equal(
        from_local(drawn, mesh, x.placements, (3, 8)).full_tensor(), torch.empty(3, 8).normal_()
    )
    torch.manual_seed(6)
    dropped = torch.nn.functional.dropout(x, 0.5)
    torch.manual_seed(6)
    assert torch.equal(dropped.full_tensor(), torch.nn.functional.dropout(value, 0.5))
    return dropped.placements == x.placements


def test_interval_shard_as_placement(rank_pool: RankPool):
    rank_pool.run(2, placements)
