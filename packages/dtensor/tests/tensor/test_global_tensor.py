"""Global tensors against one device: values and gradients of every case from every placement of the inputs."""

from __future__ import annotations

import itertools
import sys
import traceback
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_dtensor.testing.on_device import device_type
from meshwright_dtensor.testing.rank_pool import RankPool

sys.path.insert(0, str(Path(__file__).parent))

from global_cases import CASES


def full(x):
    return x.full_tensor() if isinstance(x, GlobalTensor) else x


def leaves(x):
    return list(x) if isinstance(x, (tuple, list)) else [x]


def weighted(outs):
    total = 0
    for out in outs:
        if isinstance(out, torch.Tensor) and out.is_floating_point():
            total = (
                total
                + (
                    out.double() * torch.linspace(0, 1, out.numel(), dtype=torch.float64).view(out.shape)
                ).sum()
            )
    return total


def close(actual, expected):
    """Within a few rounding errors of the tensor's largest magnitude."""
    largest = expected.abs().max().item() if expected.numel() and expected.is_floating_point() else 0.0
    torch.testing.assert_close(actual, expected, rtol=1.3e-6, atol=3e-6 * max(largest, 1.0))


def compare(name, mesh, combination):
    function, shapes, grad = CASES[name]
    torch.manual_seed(0)
    xs = [torch.randn(s) for s in shapes]
    plain = [x.clone().requires_grad_(grad) for x in xs]
    expected = leaves(function(*[p * 1 for p in plain]))
    here = [distribute(x, mesh, s).requires_grad_(grad) for x, s in zip(xs, combination, strict=True)]
    actual = leaves(function(*[g * 1 for g in here]))
    assert len(expected) == len(actual)
    for a, b in zip(expected, actual, strict=True):
        if isinstance(a, torch.Tensor):
            assert a.shape == b.shape and a.dtype == b.dtype
            close(full(b), a)
        else:
            assert a == b
    if grad:
        weighted(expected).backward()
        weighted(actual).backward()
        for p, g in zip(plain, here, strict=True):
            close(full(g.grad), p.grad)


def run_cases(rank, world, sizes, names):
    mesh = init_device_mesh(device_type(), sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    failures, tiers = [], {}
    for name in names:
        shapes = CASES[name][1]
        options = []
        for shape in shapes:
            each = (
                ["I", *range(len(shape))] if len(shapes) == 1 or len(sizes) == 1 else ["I", 0, len(shape) - 1]
            )
            options.append([s for s in itertools.product(each, repeat=len(sizes)) if _legal(shape, s, sizes)])
        context = MeshContext.of(mesh)
        before = dict(context.report.tiers)
        for combination in itertools.product(*options):
            try:
                compare(name, mesh, combination)
            except Exception as e:
                failures.append((name, combination, repr(e)[:300], traceback.format_exc()[-1500:]))
        tiers[name] = {t: context.report.tiers[t] - before[t] for t in (1, 2, 3)}
    return (
        failures,
        tiers,
        [(e.function, e.tier, e.layouts, e.reason) for e in MeshContext.of(mesh).report.entries],
    )


def _legal(shape, states, sizes):
    from meshwright_dtensor.sharding.boxes import shardable

    left = list(shape)
    for s, n in zip(states, sizes, strict=True):
        if isinstance(s, int):
            if not shardable(left[s], n):
                return False
            left[s] = -(-left[s] // n)
    return True


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(2,), (3,)])
def test_functions_from_all_placements(rank_pool: RankPool, sizes):
    for failures, _, _ in rank_pool.run(sizes[0], run_cases, sizes, list(CASES), timeout=600):
        assert not failures, failures[0][-1] + "\n" + "\n".join(str(f[:3]) for f in failures)


TWO_AXES = (
    "slice softmax layer_norm mean_var cumsum matmul arithmetic broadcast cat flatten heads permute expand where index "
    "gather sdpa in_place in_place_slices two_uses function checkpoint linear cross_entropy odd_matmul odd_view"
).split()


@pytest.mark.slow
def test_two_axes(rank_pool: RankPool):
    for failures, _, _ in rank_pool.run(4, run_cases, (2, 2), TWO_AXES, timeout=600):
        assert not failures, failures[0][-1] + "\n" + "\n".join(str(f[:3]) for f in failures)


def refuse_empty(rank, world):
    mesh = init_device_mesh(device_type(), (world,), mesh_dim_names=("tp",))
    with pytest.raises(UnsupportedError, match="a rank would be empty"):
        distribute(torch.zeros(1, 3), mesh, [0])
    with pytest.raises(UnsupportedError, match="placements were given"):
        distribute(torch.zeros(1, 3), mesh, [0, 1])
    return True


def test_bad_placements_are_rejected(rank_pool: RankPool):
    assert all(rank_pool.run(2, refuse_empty))
