"""Elementwise arithmetic of optimizers runs on local parts: same values, no sharding propagation."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright_dtensor.api import as_mesh_parameter
from meshwright_dtensor.sharding.intervals import segmented_shard
from meshwright_dtensor.stored.elementwise import is_elementwise
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

STEPS = {
    "sgd": lambda ps: torch.optim.SGD(ps, 0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, 1e-2, amsgrad=True),
    "adamw foreach": lambda ps: torch.optim.AdamW(ps, 1e-2, foreach=True),
    "adamw fused": lambda ps: torch.optim.AdamW(ps, 1e-2, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, 1e-2),
    "adadelta foreach": lambda ps: torch.optim.Adadelta(ps, foreach=True),
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, 1e-2, centered=True, momentum=0.5),
    "nadam": lambda ps: torch.optim.NAdam(ps, 1e-2),
    "radam": lambda ps: torch.optim.RAdam(ps, 1e-2),
    "adamax": lambda ps: torch.optim.Adamax(ps, 1e-2),
    "rprop": lambda ps: torch.optim.Rprop(ps, 1e-2),
}


class SeenOnMesh(TorchDispatchMode):
    """The ops that reached stock DTensor's dispatch."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


def pair(mesh, shape, placements):
    value = torch.randn(shape)
    plain = nn.Parameter(value.clone())
    states = tuple(p.dim if isinstance(p, Shard) else "I" for p in placements)
    return plain, as_mesh_parameter(distribute_tensor(value, mesh, placements), states)


def exactly(actual, expected):
    assert torch.equal(actual, expected)


def run_steps(rank, world, name):
    mesh = init_device_mesh(device_type(), (2, world // 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(3)
    pairs = [
        pair(mesh, shape, placements)
        for shape, placements in (
            ((7, 5), [Replicate(), Shard(0)]),
            ((6, 4, 3), [Shard(0), Shard(2)]),
            ((5,), [Replicate(), Replicate()]),
            ((1, 3), [Shard(0), Replicate()]),  # empty on half of the ranks
        )
    ]
    ours, theirs = STEPS[name]([p for _, p in pairs]), STEPS[name]([p for p, _ in pairs])
    seen = SeenOnMesh()
    for _ in range(3):
        for plain, here in pairs:
            plain.grad = torch.randn(plain.shape)
            here.grad = plain.grad
        theirs.step()
        with seen:
            ours.step()
    for plain, here in pairs:
        same = (
            torch.testing.assert_close if "fused" in name else exactly
        )  # vector kernels round the ends of a part otherwise
        same(here.full_tensor().detach(), plain.detach())
        for key, state in theirs.state[plain].items():
            actual = ours.state[here][key]
            same(actual.full_tensor() if isinstance(actual, DTensor) else actual, state)
    return sorted(set(seen.names) - {"detach.default", "alias.default"})


@pytest.mark.parametrize("name", list(STEPS))
def test_optimizer_step_needs_no_sharding_propagation(rank_pool: RankPool, name: str) -> None:
    for names in rank_pool.run(4, run_steps, name):
        assert names == []


def run_what_is_left_to_stock(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    value = torch.arange(12.0).reshape(4, 3)
    x = mesh_value(distribute_tensor(value, mesh, [Shard(0)]))
    whole = mesh_value(distribute_tensor(value, mesh, [Replicate()]))
    row = mesh_value(distribute_tensor(value[0], mesh, [Replicate()]))
    checks = {
        "otherwise placed": torch.equal((x + whole).full_tensor(), value + value),
        "broadcast": torch.equal((x * row).full_tensor(), value * value[0]),
        "a number on the mesh": torch.equal((x * x.sum()).full_tensor(), value * value.sum()),
        "not elementwise": float(x.max()) == 11.0,
        "mask": torch.equal(torch.where(x > 3, x, -x).full_tensor(), torch.where(value > 3, value, -value)),
        "dtype": (x > 3).dtype is torch.bool
        and x.bool().dtype is torch.bool
        and isinstance(x > 3, MeshValue),
        "made alike": torch.zeros_like(x, dtype=torch.float64).placements == x.placements,
    }
    checks["a plain tensor"] = x.add_(value) is x and torch.equal(x.full_tensor(), value + value)
    return checks


def test_other_calls_go_to_stock_dtensor(rank_pool: RankPool) -> None:
    for checks in rank_pool.run(2, run_what_is_left_to_stock):
        assert all(checks.values()) and "a plain tensor" in checks, checks


def mix_layouts(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    fused = segmented_shard(0, (4, 8), world)
    x, other = (
        as_mesh_parameter(distribute_tensor(torch.randn(12, 3), mesh, [Shard(0)]), (state,))
        for state in (fused, 0)
    )
    with torch.no_grad():
        assert torch.equal((x + x).to_local(), x.to_local() * 2)
        expected = x.full_tensor() + other.full_tensor()
        x.add_(other)
        return torch.equal(x.full_tensor(), expected)


def test_interval_shards_and_plain_shards_add_up(rank_pool: RankPool) -> None:
    assert all(rank_pool.run(2, mix_layouts))


@pytest.mark.parametrize(
    "name", ["add_", "_foreach_addcdiv_", "lerp", "sqrt", "zeros_like", "_foreach_copy_"]
)
def test_elementwise(name: str) -> None:
    assert is_elementwise(name)


@pytest.mark.parametrize(
    "name", ["max", "sum", "norm", "_foreach_norm", "normal_", "rand_like", "matmul", "cumsum", "__get__"]
)
def test_not_elementwise(name: str) -> None:
    assert not is_elementwise(name)
