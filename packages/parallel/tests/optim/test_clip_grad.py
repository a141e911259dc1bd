"""clip_grad_norm_ and get_total_norm: the norm of one device for gradients with any placements."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel.optim.clip_grad import clip_grad_norm_, get_total_norm

SHAPES = [(7, 5), (6, 4), (9,), (4, 6, 2), (3, 8), (5,), ()]


def values(dtype: torch.dtype, special: float | None = None) -> list[torch.Tensor]:
    generator = seeded(5)
    actual = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]
    if special is not None:
        actual[3][-1, -1, -1] = special
    return actual


def parameter(value: torch.Tensor, grad: torch.Tensor | None) -> nn.Parameter:
    p = nn.Parameter(value)
    p.grad = grad
    return p


def clipped(
    rank: int, world_size: int, dtype: torch.dtype, p: float, max_norm: float, special: float | None
) -> Any:
    """Total norm and gradients of one device and of a mix of plain tensors, two meshes and many placements."""
    mesh = init_device_mesh(device_type(), (world_size // 2, 2), mesh_dim_names=("dp", "tp"))
    flat = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("all",))
    lay: list[Any] = [
        (mesh, [Replicate(), Shard(0)]),
        (mesh, [Shard(1), Shard(0)]),
        (flat, [Shard(0)]),
        (mesh, [Replicate(), Shard(2)]),
        None,
        (flat, [Replicate()]),
        None,
    ]
    full = values(dtype, special)
    plain = [parameter(v, v.clone()) for v in full] + [parameter(torch.ones(2), None)]
    expected = torch.nn.utils.clip_grad_norm_(plain, max_norm, p)
    mixed = []
    for value, where in zip(full, lay, strict=True):
        if where is None:
            mixed.append(parameter(value, value.clone()))
        else:
            placed = distribute_tensor(value, *where, src_data_rank=None)
            mixed.append(parameter(placed, distribute_tensor(value.clone(), *where, src_data_rank=None)))
    actual = clip_grad_norm_([*mixed, parameter(torch.ones(2), None)], max_norm, p)
    assert type(actual) is torch.Tensor
    assert actual.dtype == expected.dtype
    grads = [g.full_tensor() if isinstance(g, DTensor) else g for g in (q.grad for q in mixed)]
    return expected, actual, [q.grad for q in plain[:-1]], grads


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [2.0, math.inf, 1.0, 3.5, -math.inf, 0.0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_mixed_gradients(rank_pool: RankPool, world_size: int, p: float, dtype: torch.dtype) -> None:
    results = rank_pool.run(world_size, clipped, dtype, p, 0.5, None)
    for expected, actual, want, got in results:
        torch.testing.assert_close(actual, expected)
        torch.testing.assert_close(got, want)
        assert torch.equal(actual, results[0][1])  # the same on every rank, bit for bit
    if p == 2.0:  # the shards of one rank alone have another norm: what a naive norm would give
        assert not torch.isclose(
            torch.linalg.vector_norm(values(dtype)[1][:3]), torch.linalg.vector_norm(values(dtype)[1])
        )


@pytest.mark.parametrize("special", [math.nan, math.inf])
@pytest.mark.parametrize("p", [2.0, math.inf])
def test_nan_and_inf_reach_every_rank(rank_pool: RankPool, p: float, special: float) -> None:
    for expected, actual, _, _ in rank_pool.run(4, clipped, torch.float32, p, 1.0, special):
        torch.testing.assert_close(actual, expected, equal_nan=True)


def partial(rank: int, world_size: int) -> torch.Tensor:
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    return get_total_norm(DTensor.from_local(torch.full((3,), 1.0 + rank), mesh, [Partial()]))


def test_partial_sums_are_completed_first(rank_pool: RankPool) -> None:
    for actual in rank_pool.run(2, partial):
        torch.testing.assert_close(actual, torch.tensor(3.0 * math.sqrt(3.0)))


def test_small_cases_and_errors() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    p = parameter(torch.zeros(3), torch.tensor([3.0, 4.0, 0.0]))
    assert clip_grad_norm_(p, 10.0).item() == 5.0
    assert p.grad is not None
    assert p.grad.tolist() == [3.0, 4.0, 0.0]
    p.grad[0] = math.nan
    with pytest.raises(RuntimeError, match="nan"):
        clip_grad_norm_(p, 1.0, error_if_nonfinite=True)
    with pytest.raises(UsageError, match="norm_type"):
        clip_grad_norm_(p, 1.0, math.nan)
    with pytest.raises(TypeError):
        clip_grad_norm_(p, 1.0, norm=2)  # type: ignore[call-arg]


def large(rank: int, world_size: int) -> tuple[float, float]:
    """The norm of a large gradient, whole and in shards."""
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("tp",))
    value = torch.randn(1000, 1001, generator=seeded(1))
    sharded = distribute_tensor(value, mesh, [Shard(0)], src_data_rank=None)
    return float(get_total_norm(value)), float(get_total_norm(sharded))


def test_norm_of_a_large_tensor_is_exact_for_any_placement(rank_pool: RankPool) -> None:
    value = torch.randn(1000, 1001, generator=seeded(1))
    exact = float(torch.linalg.vector_norm(value.double()))
    whole, sharded = rank_pool.run(2, large)[0]
    assert whole == pytest.approx(exact, rel=1e-7) and sharded == pytest.approx(exact, rel=1e-7)
    # the control: torch adds one float32 after the other
    assert abs(float(torch.nn.utils.get_total_norm([value])) - exact) > 1e-6 * exact
