"""Counts of values over shards: counted on each shard, gathered where the bins depend on the whole value."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.comm.log import communication
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

EXPERTS, TOP_K = 5, 2


def of_experts(logits):
    """How many tokens each expert gets, as transformers counts them."""
    _, chosen = logits.softmax(-1).topk(TOP_K, dim=-1)
    return torch.histc(chosen.reshape(-1).to(torch.float32), bins=EXPERTS, min=0, max=EXPERTS)


def weighted(logits):
    """The same with weights, added up at the indices."""
    _, chosen = logits.softmax(-1).topk(TOP_K, dim=-1)
    weights = (logits.sum(-1) > 0).float().repeat_interleave(TOP_K)
    return torch.zeros(EXPERTS).scatter_add_(0, chosen.reshape(-1), weights)


def balance(logits):
    """Switch's auxiliary loss: counts times probabilities, both of the whole."""
    probabilities = logits.softmax(-1)
    flat = probabilities.reshape(-1, EXPERTS)
    return (of_experts(logits) / flat.shape[0] * flat.mean(0).unsqueeze(0)).sum() * EXPERTS


ON_SHARDS = {
    "histc": lambda x: torch.histc(x, 7, -1, 2),
    "histc method": lambda x: x.histc(bins=4, min=0, max=1.5) * 2,
    "histc some": lambda x: torch.histc(x[:, 0].detach(), bins=3, min=-2, max=2),
    "histogram": lambda x: tuple(torch.histogram(x.detach(), 4, range=(-1.0, 1.0))),
    "count_nonzero": lambda x: (torch.count_nonzero(x > 0), torch.count_nonzero(x > 1, dim=0)),
    "of experts": of_experts,
}
GATHERED = {
    "histc unbounded": lambda x: torch.histc(x, 6),
    "histc equal bounds": lambda x: torch.histc(x, 6, 1, 1),
    "histogram unbounded": lambda x: tuple(torch.histogram(x.detach(), 4)),
    "histogram density": lambda x: tuple(torch.histogram(x.detach(), 4, range=(-1.0, 1.0), density=True)),
    "bincount": lambda x: torch.bincount((x > 0).sum(-1).reshape(-1), minlength=3),
    "weighted": weighted,
}


def full(x):
    return x.full_tensor() if isinstance(x, GlobalTensor) else x


def leaves(x):
    return x if isinstance(x, tuple) else (x,)


def count(rank, world, shape, names):
    """Failures, and what counts otherwise than on shards, from every placement of random values on (dp) or (dp, tp)."""
    sizes = (world,) if world < 4 else (2, 2)
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("dp", "tp")[: len(sizes)])
    failures, otherwise = [], set()
    each = [s for s in ("I", 0, 1) if s == "I" or shardable(shape[s], world)]
    for name, states in itertools.product(names, itertools.product(each, repeat=len(sizes))):
        values = torch.randn(shape, generator=seeded(sum(shape)))
        function = (ON_SHARDS | GATHERED)[name]
        context = MeshContext.of(mesh)
        before = len(context.report.entries)
        expected, actual = leaves(function(values)), leaves(function(distribute(values, mesh, states)))
        for a, b in zip(expected, actual, strict=True):
            if a.dtype != b.dtype or not torch.equal(a, full(b)):
                failures.append((name, states, a, full(b)))
        # the inner axis cannot shard parts of different sizes
        uneven = len(sizes) > 1 and states[0] == states[1]
        for entry in context.report.entries[before:] if not uneven else ():
            if entry.function in ("histc", "histogram", "count_nonzero"):
                otherwise.add(name)
    return failures, otherwise


@pytest.mark.slow
@pytest.mark.parametrize(("world", "shape"), [(2, (5, 5)), (3, (7, 5)), (4, (13, 5))], ids=str)
def test_counts_are_those_of_one_device(rank_pool: RankPool, world, shape):
    for failures, otherwise in rank_pool.run(world, count, shape, [*ON_SHARDS, *GATHERED]):
        assert not failures, failures
        assert not otherwise & ON_SHARDS.keys(), "calls of tier 2 or 3"


def communicated(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    logits = distribute(torch.randn(9, EXPERTS), mesh, [0])
    with communication() as log:
        counts = of_experts(logits)
        states = counts._layout.states
        counts = counts / logits.shape[0]
        counts.full_tensor()
    return states, [(e.kind, e.nbytes) for e in log.events]


def test_bincount_communicates_only_counts(rank_pool: RankPool):
    for states, events in rank_pool.run(2, communicated):
        assert states == ("P",)
        assert events == [("all_reduce", EXPERTS * 4)]


def gradients(rank, world):
    """Largest differences of the loss and its gradient, from each placement."""
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("dp",))
    plain = torch.randn(9, EXPERTS).requires_grad_()
    expected = balance(plain)
    expected.backward()
    apart = []
    for state in ("I", 0, 1):
        here = distribute(plain.detach(), mesh, [state]).requires_grad_()
        loss = balance(here)
        loss.backward()
        apart.append(float((loss.full_tensor() - expected).detach().abs()))
        apart.append(float((here.grad.full_tensor() - plain.grad).abs().max()))
    return apart


def test_expert_balance_loss_has_gradients(rank_pool: RankPool):
    for apart in rank_pool.run(2, gradients):
        assert max(apart) < 1e-6, apart
