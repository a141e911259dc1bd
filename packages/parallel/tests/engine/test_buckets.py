"""Reuse of bucket memory, on real ranks: only when nothing else uses it any more."""

from __future__ import annotations

import itertools
import time

import pytest
import torch
from parallel_models import plan_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy import Link, ModelSizes, ParameterSize, SearchRequest, StepContext
from meshwright_dtensor.testing.on_device import device_type, seeded
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.engine import buckets as bucketing
from meshwright_parallel.engine.buckets import BucketSizes
from meshwright_parallel.engine.grad_reduction import DataReduction, reduction_of
from meshwright_parallel.strategies.data import Data

STEPS = 6


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def attach(model: nn.Module, world_size: int, nbytes: int = 2**20, reuse: bool = True) -> DataReduction:
    mesh = init_device_mesh(device_type(), (world_size,), mesh_dim_names=("dp",))
    sizes = BucketSizes(nbytes, reuse=reuse)
    return DataReduction(mesh, [(n, p, ("dp",)) for n, p in model.named_parameters()], sizes)


def backward(model: nn.Module, step: int, rank: int, world_size: int) -> None:
    x = torch.randn(6, 7, dtype=torch.float64, generator=seeded(step))
    model(x.chunk(world_size)[rank]).square().sum().backward()


def places(rank: int, world_size: int, keep: bool) -> list[int]:
    """The address of the first gradient in each step; `keep`: another gradient of the second step is held."""
    model, actual, kept = model_of(), [], []
    engine = attach(model, world_size)
    for step in range(STEPS):
        backward(model, step, rank, world_size)
        actual.append(model[0].weight.grad.data_ptr())
        (bucket,) = engine._buckets
        if step:  # new memory may have the same address by chance: the next step asks for this memory
            local = model[0].weight.grad.untyped_storage().data_ptr()
            assert bucket.previous.untyped_storage().data_ptr() == local
        if keep and step == 1:
            kept.append(model[0].bias.grad)
        model.zero_grad()
        # a sum that has ended is let go of by another thread
        while step and not (keep and step == 1) and not bucketing.is_only_user(bucket.previous):
            time.sleep(0.001)
    return actual


@pytest.mark.parametrize("keep", [False, True])
def test_bucket_memory_is_reused(rank_pool: RankPool, keep: bool) -> None:
    """From the second step on: after the first, buckets are refilled in the order of the gradients.

    A gradient held from the second step keeps its memory, so that of the third step is reused.
    """
    for actual in rank_pool.run(2, places, keep):
        assert len(set(actual[1 + keep :])) == 1 and (actual[1] != actual[2]) == keep


def adding(rank: int, world_size: int) -> list[bool]:
    """For each step, whether exactly the gradients to which a second pass has added use the kept memory."""
    model, actual = model_of(), []
    engine = attach(model, world_size)
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part, rank, world_size)
        (bucket,) = engine._buckets
        there = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        actual.append(bucket.previous is not None and {bucket.previous.untyped_storage().data_ptr()} == there)
        model.zero_grad()
    return actual


def test_accumulating_pass_keeps_no_second_buffer(rank_pool: RankPool) -> None:
    for actual in rank_pool.run(2, adding):
        assert all(actual[1:])


def kept(rank: int, world_size: int, how: str, blind: bool) -> list[list[torch.Tensor]]:
    """Gradients that a user holds from every step, and their values then; `blind`: without the check for other users."""
    original = bucketing.is_only_user
    model, actual = model_of(), []
    attach(model, world_size)
    try:
        if blind:
            bucketing.is_only_user = lambda tensor: True
        for step in range(STEPS):
            backward(model, step, rank, world_size)
            for p in model.parameters():
                hold = {
                    "gradient": lambda g: g,
                    "view": lambda g: g.view(-1)[1:],
                    "array": lambda g: torch.from_numpy(g.numpy()),
                    "storage": lambda g: g.untyped_storage(),
                }
                held = hold[how](p.grad)
                actual.append([held, held.clone()])
            model.zero_grad()
    finally:
        bucketing.is_only_user = original
    return [[_whole(held), _whole(was)] for held, was in actual]


def _whole(held: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """The values of a held tensor or storage."""
    if isinstance(held, torch.Tensor):
        return held.clone()
    return torch.tensor(held.tolist())


@pytest.mark.parametrize(
    "how", ["gradient", "view", pytest.param("array", marks=pytest.mark.host("NumPy")), "storage"]
)
def test_gradients_held_by_the_user_do_not_change(rank_pool: RankPool, how: str) -> None:
    for actual in rank_pool.run(2, kept, how, False):
        assert all(torch.equal(held, was) for held, was in actual)
    for actual in rank_pool.run(2, kept, how, True):  # without the check
        assert not all(torch.equal(held, was) for held, was in actual)


def accumulated(rank: int, world_size: int, engine: bool) -> list[torch.Tensor]:
    """Two backward passes a step, and a third whose gradients stay in place (`set_to_none=False`)."""
    model, actual = model_of(), []
    if engine:
        attach(model, world_size, nbytes=300)
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part, rank, world_size)
        actual += [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=step % 2 == 0)
    return actual


@pytest.mark.slow
def test_accumulated_passes_equal_one_device(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, accumulated, False)
    for actual in rank_pool.run(2, accumulated, True):
        torch.testing.assert_close(actual, expected)


def given_up(rank: int, world_size: int) -> list[torch.Tensor]:
    """A pass that raises half-way, between other passes."""
    model, actual = model_of(), []
    attach(model, world_size, nbytes=300)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("on purpose")

    for step in range(STEPS):
        handle = model[0].register_full_backward_hook(lambda *_: fail(_[2][0])) if step == 3 else None
        try:
            backward(model, step, rank, world_size)
        except RuntimeError:
            assert step == 3
            assert all(p.grad is None for p in model.parameters())
        else:
            actual += [p.grad.clone() for p in model.parameters()]
        if handle is not None:
            handle.remove()
        model.zero_grad()
    return actual


def test_pass_that_raises_changes_no_gradient(rank_pool: RankPool) -> None:
    expected = []
    model = model_of()
    for step in range(STEPS):
        if step != 3:
            backward(model, step, 0, 1)
            expected += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    for actual in rank_pool.run(2, given_up):
        torch.testing.assert_close(actual, expected)


SIZES = (1024, 1024, 1023)


def staying(rank: int, world_size: int, plan: ParallelPlan) -> int:
    """Elements of gradients whose memory is kept between steps."""
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(SIZES)]
    model = parallelize(nn.Sequential(*layers), plan)
    for _ in range(3):
        model(torch.ones(2, SIZES[0])).float().square().mean().backward()
        model.zero_grad()
    engine = reduction_of(model)
    assert engine is not None
    return sum(bucket.numel for bucket in engine._buckets if bucket.previous is not None)


@pytest.mark.slow
@pytest.mark.parametrize(("precision", "large"), [(None, False), ("bf16", True)])
def test_predicted_bucket_memory_equals_actual(
    rank_pool: RankPool, precision: str | None, large: bool
) -> None:
    """A gradient of 4 MiB is reduced in place, unless it is copied in any case: into the dtype of the parameter."""
    plan = plan_of(degrees={"dp": 2}, precision=None if precision is None else {"parameters": precision})
    used = 4 if precision is None else 2
    unit = tuple(ParameterSize((m, n), (), (4, used), True) for n, m in itertools.pairwise(SIZES))
    whole = sum(4 * size.numel for size in unit)
    request = SearchRequest(
        2, 2, sizes=ModelSizes(gradient_bytes=whole, units=(unit,)), step=StepContext(accelerated=False)
    )
    text = Data().cost(request, 2, Link("cable", 1e-5, 1e9)).persistent_gradients
    assert text * whole == pytest.approx(sum(4 * size.numel for size in unit[0 if large else 1 :]))
    for actual in rank_pool.run(2, staying, plan):
        assert 4 * actual == pytest.approx(text * whole)
