"""Memory of buckets that is taken again, on real ranks: only where nobody sees what lies in it any more."""

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
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_parallel import parallelize
from meshwright_parallel.engine import DataReduction
from meshwright_parallel.engine import buckets as bucketing
from meshwright_parallel.engine.buckets import BucketSizes
from meshwright_parallel.engine.grad_reduction import reduction_of
from meshwright_parallel.strategies.data import Data

STEPS = 6


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def attach(model: nn.Module, world_size: int, nbytes: int = 2**20, reuse: bool = True) -> DataReduction:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    sizes = BucketSizes(nbytes, reuse=reuse)
    return DataReduction(mesh, [(n, p, ("dp",)) for n, p in model.named_parameters()], sizes)


def backward(model: nn.Module, step: int, rank: int, world_size: int) -> None:
    x = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    model(x.chunk(world_size)[rank]).square().sum().backward()


def places(rank: int, world_size: int, keep: bool) -> list[int]:
    """Where the first gradient lies, step by step; `keep`: another one of the second step is held on to."""
    model, found, kept = model_of(), [], []
    engine = attach(model, world_size)
    for step in range(STEPS):
        backward(model, step, rank, world_size)
        found.append(model[0].weight.grad.data_ptr())
        (bucket,) = engine._buckets
        if step:  # fresh memory may lie at the same place by chance: this is what the next step asks for
            own = model[0].weight.grad.untyped_storage().data_ptr()
            assert bucket.previous.untyped_storage().data_ptr() == own
        if keep and step == 1:
            kept.append(model[0].bias.grad)
        model.zero_grad()
        # a sum that has ended is let go of by another thread
        while step and not (keep and step == 1) and not bucketing.is_only_user(bucket.previous):
            time.sleep(0.001)
    return found


@pytest.mark.parametrize("keep", [False, True])
def test_memory_is_taken_again(rank_pool: RankPool, keep: bool) -> None:
    """From the second step on: after the first, buckets are filled in the order in which gradients come.

    Whoever keeps a gradient of that one has its memory; from the third step on it is that of the third.
    """
    for found in rank_pool.run(2, places, keep):
        assert len(set(found[1 + keep :])) == 1 and (found[1] != found[2]) == keep


def adding(rank: int, world_size: int) -> list[bool]:
    """Step by step, whether gradients to which a second pass has added lie in what stays, and nothing else does."""
    model, found = model_of(), []
    engine = attach(model, world_size)
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part, rank, world_size)
        (bucket,) = engine._buckets
        there = {p.grad.untyped_storage().data_ptr() for p in model.parameters()}
        found.append(bucket.previous is not None and {bucket.previous.untyped_storage().data_ptr()} == there)
        model.zero_grad()
    return found


def test_a_pass_that_adds_leaves_no_memory_behind(rank_pool: RankPool) -> None:
    for found in rank_pool.run(2, adding):
        assert all(found[1:])


def kept(rank: int, world_size: int, how: str, blind: bool) -> list[list[torch.Tensor]]:
    """Gradients that a user holds on to from every step, and what they were then; `blind`: nobody looks for that."""
    known = bucketing.is_only_user
    model, found = model_of(), []
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
                found.append([held, held.clone()])
            model.zero_grad()
    finally:
        bucketing.is_only_user = known
    return [[_whole(held), _whole(was)] for held, was in found]


def _whole(held: torch.Tensor | torch.UntypedStorage) -> torch.Tensor:
    """The values of what a user holds."""
    if isinstance(held, torch.Tensor):
        return held.clone()
    return torch.tensor(held.tolist())


@pytest.mark.parametrize("how", ["gradient", "view", "array", "storage"])
def test_gradients_that_are_held_stay_what_they_were(rank_pool: RankPool, how: str) -> None:
    for found in rank_pool.run(2, kept, how, False):
        assert all(torch.equal(held, was) for held, was in found)
    for found in rank_pool.run(2, kept, how, True):  # unless it is looked for
        assert not all(torch.equal(held, was) for held, was in found)


def accumulated(rank: int, world_size: int, engine: bool) -> list[torch.Tensor]:
    """Two backward passes a step, and a third whose gradients stay in place (`set_to_none=False`)."""
    model, found = model_of(), []
    if engine:
        attach(model, world_size, nbytes=300)
    for step in range(STEPS):
        for part in range(2):
            backward(model, 2 * step + part, rank, world_size)
        found += [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=step % 2 == 0)
    return found


def test_passes_that_add_up(rank_pool: RankPool) -> None:
    (expected,) = rank_pool.run(1, accumulated, False)
    for found in rank_pool.run(2, accumulated, True):
        torch.testing.assert_close(found, expected)


def given_up(rank: int, world_size: int) -> list[torch.Tensor]:
    """A pass that raises half-way, between others."""
    model, found = model_of(), []
    attach(model, world_size, nbytes=300)

    def fail(gradient: torch.Tensor) -> None:
        raise RuntimeError("given up")

    for step in range(STEPS):
        handle = model[0].register_full_backward_hook(lambda *_: fail(_[2][0])) if step == 3 else None
        try:
            backward(model, step, rank, world_size)
        except RuntimeError:
            assert step == 3
            assert all(p.grad is None for p in model.parameters())
        else:
            found += [p.grad.clone() for p in model.parameters()]
        if handle is not None:
            handle.remove()
        model.zero_grad()
    return found


def test_a_pass_that_is_given_up_spoils_nothing(rank_pool: RankPool) -> None:
    expected = []
    model = model_of()
    for step in range(STEPS):
        if step != 3:
            backward(model, step, 0, 1)
            expected += [p.grad.clone() for p in model.parameters()]
            model.zero_grad()
    for found in rank_pool.run(2, given_up):
        torch.testing.assert_close(found, expected)


SIZES = (1024, 1024, 1023)


def staying(rank: int, world_size: int, plan: ParallelPlan) -> int:
    """Elements of gradients whose memory is there between steps."""
    layers = [nn.Linear(n, m, bias=False) for n, m in itertools.pairwise(SIZES)]
    model = parallelize(nn.Sequential(*layers), plan)
    for _ in range(3):
        model(torch.ones(2, SIZES[0])).float().square().mean().backward()
        model.zero_grad()
    engine = reduction_of(model)
    assert engine is not None
    return sum(bucket.numel for bucket in engine._buckets if bucket.previous is not None)


@pytest.mark.parametrize(("precision", "large"), [(None, False), ("bf16", True)])
def test_what_is_said_to_stay_is_what_stays(rank_pool: RankPool, precision: str | None, large: bool) -> None:
    """A gradient of 4 MiB is summed from where it lies, unless it is copied anyway: into the dtype of the parameter."""
    plan = plan_of(degrees={"dp": 2}, precision=None if precision is None else {"parameters": precision})
    used = 4 if precision is None else 2
    unit = tuple(ParameterSize((m, n), (), (4, used), True) for n, m in itertools.pairwise(SIZES))
    whole = sum(4 * size.numel for size in unit)
    request = SearchRequest(
        2, 2, sizes=ModelSizes(gradient_bytes=whole, units=(unit,)), step=StepContext(accelerated=False)
    )
    said = Data().cost(request, 2, Link("wire", 1e-5, 1e9)).persistent_gradients
    assert said * whole == pytest.approx(sum(4 * size.numel for size in unit[0 if large else 1 :]))
    for found in rank_pool.run(2, staying, plan):
        assert 4 * found == pytest.approx(said * whole)
