"""Edges of global tensors, from every state: attributes that compute, second derivatives, gathered views, memory order."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.testing.on_device import device_type, random_state, seeded
from meshwright_dtensor.testing.rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent))

from test_global_tensor import close, full, leaves, weighted


def penalty(x):
    y = F.silu((x**3).sum(-1)).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    return (g * g).sum(0), g


def penalty_of_layers(x):
    y = torch.tanh(x.transpose(0, 1) @ torch.linspace(0, 1, 32).view(8, 4)).reshape(6, -1).softmax(-1)
    (g,) = torch.autograd.grad((y * torch.arange(16)).sum(), x, create_graph=True)
    return (g * g).sum(0)


def penalty_of_mean_loss(x):
    loss = F.cross_entropy(x.transpose(1, 2), (torch.arange(24) % 8).view(4, 6)) ** 2
    (g,) = torch.autograd.grad(loss, x, create_graph=True)
    return (g * g).sum()


def penalty_of_batch_norm(x):
    (g,) = torch.autograd.grad(F.batch_norm(x, None, None, training=True).pow(3).sum(), x, create_graph=True)
    return (g * g).sum()


CASES = {
    "real": (lambda x: torch.fft.fft(x).real, (4, 6, 8)),
    "imag": (lambda x: torch.fft.fft(x, dim=1).imag * 2, (4, 6, 8)),
    "conjugate_transposed": (lambda x: x[0].H @ x[0] + x.mH.sum(0)[:, :1], (4, 6, 8)),
    "nbytes": (lambda x: (x * x.nbytes, x._base is None), (4, 6, 8)),
    "penalty": (penalty, (4, 6, 8)),
    "penalty_of_layers": (penalty_of_layers, (4, 6, 8)),
    "penalty_of_batch_norm": (penalty_of_batch_norm, (4, 6, 8)),
    "straight_through": (lambda x: F.gumbel_softmax(x, hard=True), (4, 6, 8)),
    "draws_by_value": (
        lambda x: (torch.multinomial(x.reshape(-1, 8).softmax(-1), 2), F.rrelu(x, training=True)), (4, 6, 8)),
    "order_of_memory": (
        lambda x: (F.dropout(x.transpose(0, 1), 0.5), torch.rand_like(x.transpose(1, 2)) * x.mean()), (2, 6, 3)),
    "order_of_memory_rows": (lambda x: F.dropout(x.transpose(0, 1) * 2, 0.5) * 3, (2, 6, 4)),
}  # fmt: skip


def compare_all(rank, world, names):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    failures = []
    for name in names:
        function, shape = CASES[name]
        x = torch.randn(shape, generator=seeded(1))
        for state in ("I", "X", "P", *range(len(shape))):
            plain = x.clone().requires_grad_()
            here = distribute(x, mesh, [state]).detach().requires_grad_()
            torch.manual_seed(5)
            expected = leaves(function(plain * 1))
            drawn = random_state()
            torch.manual_seed(5)
            actual = leaves(function(here * 1))
            assert torch.equal(drawn, random_state())
            pairs = [(full(f), e) for f, e in zip(actual, expected, strict=True)]
            if any(e.requires_grad for e in expected if isinstance(e, torch.Tensor)):
                weighted(expected).backward()
                weighted(actual).backward()
                pairs.append((full(here.grad), plain.grad))
            for f, e in pairs:
                try:
                    close(f, e) if isinstance(e, torch.Tensor) else None
                    assert isinstance(e, torch.Tensor) or f == e
                except AssertionError as error:
                    failures.append((name, state, str(error)[:300]))
    return failures


@pytest.mark.slow
def test_edge_cases_from_all_states(rank_pool: RankPool):
    for failures in rank_pool.run(2, compare_all, list(CASES), timeout=300):
        assert not failures, failures


def mean_loss_twice(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = torch.randn(4, 6, 8, generator=seeded(1))
    plain = x.clone().requires_grad_()
    penalty_of_mean_loss(plain).backward()
    for state in ("I", 0, 1):
        here = distribute(x, mesh, [state]).requires_grad_()
        penalty_of_mean_loss(here * 1).backward()
        actual = full(here.grad)
        dist.barrier()
        close(actual, plain.grad)
    here = distribute(x, mesh, [2]).requires_grad_()
    with pytest.raises(
        UnsupportedError, match=r"second derivative through cross_entropy over sharded classes"
    ):
        penalty_of_mean_loss(here * 1).backward()
    return True


def test_second_derivative_of_a_mean_loss(rank_pool: RankPool):
    assert all(rank_pool.run(2, mean_loss_twice))


def gathered_views(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = distribute(torch.arange(24.0).view(4, 6), mesh, [1])
    y = x * 1
    view = y.view(-1)
    part = view[2:6]
    part.mul_(0)
    torch.testing.assert_close(y.view(-1)[2:6].full_tensor(), torch.zeros(4))
    part.copy_(torch.arange(2.0, 6.0))
    torch.testing.assert_close(y.full_tensor(), torch.arange(24.0).view(4, 6))
    with pytest.raises(UnsupportedError, match="not reach the base"):
        torch.add(x[:, 0], 1, out=view[:4])
    y.sub_(12)
    F.relu(view, inplace=True)  # the flat view shares memory with its base
    torch.testing.assert_close(y.full_tensor(), (torch.arange(24.0) - 12).relu().view(4, 6))
    torch.testing.assert_close(view.full_tensor(), (torch.arange(24.0) - 12).relu())
    y.copy_(x)
    y.add_(1)
    torch.testing.assert_close(view.redistribute([0]).full_tensor(), torch.arange(1.0, 25.0))
    for read in (lambda: part * 1, part.full_tensor, part.to_local):
        with pytest.raises(UnsupportedError, match="take the view again"):
            read()
    torch.testing.assert_close(y.view(-1)[2:6].full_tensor(), torch.arange(3.0, 7.0))
    with torch.inference_mode():
        torch.testing.assert_close((y * 1).view(-1)[2:6].full_tensor(), torch.arange(3.0, 7.0))
    p = distribute(torch.randn(4, 6), mesh, ["P"]) * 1
    whole = p.full_tensor().clone()
    assert F.relu(p, inplace=True) is p
    torch.testing.assert_close(p.full_tensor(), whole.relu())
    return True


def written_through_data(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    for state in ("P", 0):
        x = distribute(torch.ones(4, 2), mesh, [state]) * 1
        assert x.sum().item() == 8.0 and x.full_tensor().sum() == 8.0
        data = x.data
        assert data.full_tensor().sum() == 8.0
        x.data.mul_(3)
        assert x.full_tensor().sum() == 24.0 and data.full_tensor().sum() == 24.0
    return True


def test_write_through_data_reaches_tensor(rank_pool: RankPool):
    assert all(rank_pool.run(2, written_through_data))


def test_views_of_gathered_views_and_inplace_flags(rank_pool: RankPool):
    assert all(rank_pool.run(2, gathered_views))


def formatted(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    x = distribute(torch.arange(4), mesh, [0])
    loss = distribute(torch.ones(6, requires_grad=True), mesh, [0]).square().mean()
    names = [f"expert_{i}" for i in x] + [f"expert_{i[0]}" for i in (x > 1).nonzero()]
    alone = f"{loss}" if rank == 0 else None  # a partial sum: no collective, or rank 0 waits for ever
    return names, f"{loss:.2f} {x[1]:03d} {loss.redistribute(['I'])}", f"{x}" == repr(x), (alone, repr(loss))


def test_numbers_are_formatted_as_on_one_device(rank_pool: RankPool):
    for names, numbers, whole, (alone, shown) in rank_pool.run(2, formatted):
        assert names == [f"expert_{i}" for i in (0, 1, 2, 3, 2, 3)]
        assert numbers == "1.00 001 1.0" and whole
        assert alone in (None, shown) and "local=" in shown
