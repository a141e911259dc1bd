"""Memory of buckets that is taken again, on real ranks: only where nobody sees what lies in it any more."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from meshwright_dtensor.testing import RankPool
from meshwright_parallel.engine import DataReduction
from meshwright_parallel.engine import buckets as bucketing
from meshwright_parallel.engine.buckets import Filling

STEPS = 6


def model_of() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 11), nn.Tanh(), nn.Linear(11, 3)).double()


def attach(model: nn.Module, world_size: int, nbytes: int = 2**20, again: bool = True) -> DataReduction:
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    filling = Filling(nbytes, again=again)
    return DataReduction(mesh, [(n, p, ("dp",)) for n, p in model.named_parameters()], filling)


def backward(model: nn.Module, step: int, rank: int, world_size: int) -> None:
    x = torch.randn(6, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    model(x.chunk(world_size)[rank]).square().sum().backward()


def places(rank: int, world_size: int) -> list[int | None]:
    """Where the first gradient lies, step by step."""
    model, found = model_of(), []
    engine = attach(model, world_size)
    for step in range(STEPS):
        backward(model, step, rank, world_size)
        found.append(model[0].weight.grad.data_ptr())
        model.zero_grad()
        for bucket in engine._buckets if step else ():
            while not bucketing.seen_by_none_else(
                bucket.before
            ):  # a sum that has ended is let go of by another thread
                time.sleep(0.001)
    return found


def test_memory_is_taken_again(rank_pool: RankPool) -> None:
    """From the second step on: after the first, buckets are filled in the order in which gradients come."""
    for found in rank_pool.run(2, places):
        assert len(set(found[1:])) == 1


def kept(rank: int, world_size: int, how: str, blind: bool) -> list[list[torch.Tensor]]:
    """Gradients that a user holds on to from every step, and what they were then; `blind`: nobody looks for that."""
    known = bucketing.seen_by_none_else
    model, found = model_of(), []
    attach(model, world_size)
    try:
        if blind:
            bucketing.seen_by_none_else = lambda tensor: True
        for step in range(STEPS):
            backward(model, step, rank, world_size)
            for p in model.parameters():
                hold = {
                    "gradient": lambda g: g,
                    "view": lambda g: g.view(-1)[1:],
                    "array": lambda g: torch.from_numpy(g.numpy()),
                }
                held = hold[how](p.grad)
                found.append([held, held.clone()])
            model.zero_grad()
    finally:
        bucketing.seen_by_none_else = known
    return [[held.clone(), was] for held, was in found]


@pytest.mark.parametrize("how", ["gradient", "view", "array"])
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
