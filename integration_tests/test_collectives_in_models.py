"""A model's own calls of torch.distributed see one device; those of the loop around it communicate."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.one_device import on_one_device

WIDTH = 8
PLANS: dict[str, dict[str, Any]] = {
    "tp2": {"degrees": {"tp": 2}},
    "zero3": {"degrees": {"zero": 2}, "zero": {"stage": 3}},
    "pp2": {
        "degrees": {"pp": 2},
        "pipeline": PipelineRule(
            stages=(("blocks.0", "blocks.1", "blocks.2"), tuple(f"blocks.{i}" for i in range(3, 7)))
        ),
    },
}


class Gathered(torch.autograd.Function):
    """The rows of all ranks; backward cuts them again. As losses of several ranks have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        sizes = [torch.zeros((), dtype=torch.long) for _ in range(dist.get_world_size())]
        dist.all_gather(sizes, torch.tensor(len(x)))
        parts = [torch.empty_like(x) for _ in sizes]
        dist.all_gather(parts, x.contiguous())
        ctx.sizes = [int(size) for size in sizes]
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        dist.all_reduce(gradient)
        return gradient.split(ctx.sizes)[dist.get_rank()]


def in_place(x: Tensor) -> Tensor:
    mean, largest = x.detach().mean(0), x.detach().amax(0)
    works = [dist.all_reduce(mean, async_op=True), dist.broadcast(largest, src=0, async_op=True)]
    for work in works:
        work.wait()
    dist.reduce(mean, dst=0)
    dist.barrier()
    return x - mean / dist.get_world_size() + largest


def gathers(x: Tensor) -> Tensor:
    y = x.detach()
    parts, whole = [torch.empty_like(y)], torch.empty_like(y)
    dist.all_gather(parts, y)
    dist.all_gather_into_tensor(whole, parts[0])
    dist.reduce_scatter_tensor(y := torch.empty_like(y), whole)
    dist.reduce_scatter(whole, [y.clone()])
    dist.all_to_all_single(y, whole)
    dist.all_to_all(parts, [y])
    dist.gather(parts[0], [whole])
    dist.scatter(y, [whole])
    return x + y


def objects(x: Tensor) -> Tensor:
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, dist.get_rank())
    dist.broadcast_object_list(ranks)
    assert ranks == [0] and dist.get_backend() == "gloo" and dist.get_process_group_ranks(None) == [0]
    return x * (1 + ranks[0])


def differentiated(x: Tensor) -> Tensor:
    x = differentiable.all_reduce(x) + differentiable.all_gather(x)[0]
    return differentiable.reduce_scatter(torch.empty_like(x), [x]) + differentiable.broadcast(x, 0)


def complex_numbers(x: Tensor) -> Tensor:
    turned = torch.complex(x.detach(), -x.detach())
    parts = [torch.empty_like(turned)]
    dist.all_gather(parts, turned)
    return x + parts[0].real - parts[0].imag


def recomputed(x: Tensor) -> Tensor:
    return checkpoint(in_place, x, use_reentrant=False)


FORMS = (in_place, gathers, objects, Gathered.apply, differentiated, complex_numbers, recomputed)


class Communicating(nn.Module):
    def __init__(self, form: int) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(WIDTH, WIDTH), form

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(FORMS[self.form](self.linear(x)))


class Communicates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Communicating(form) for form in range(len(FORMS)))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def one_and_parallel(rank: int, size: int, layout: str) -> dict[str, float]:
    """The largest difference of each gradient from one device."""
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(3))
    torch.manual_seed(0)
    single = Communicates()
    model = copy.deepcopy(single)
    mw.parallelize(model, ParallelPlan(world_size=size, **PLANS[layout]))
    on_one_device(lambda: single(x)).backward()
    sizes: list[int] = []
    for parameter in model.parameters() if layout != "zero3" else ():
        parameter.register_hook(lambda _: sizes.append(dist.get_world_size()))
    model(x).backward()
    # a hook of the loop is no code of the model, nor is the loop
    assert set(sizes) <= {size}
    assert (dist.get_world_size(), dist.get_rank()) == (size, rank)
    rows = torch.full((2, 1), rank + 1.0, requires_grad=True)
    gathered = Gathered.apply(rows)
    (gathered * torch.tensor([[1.0], [2.0], [3.0], [4.0]])).sum().backward()
    assert gathered.flatten().tolist() == [1, 1, 2, 2]
    assert rows.grad is not None and rows.grad.flatten().tolist() == [[2, 4], [6, 8]][rank]
    return {
        name: float((p.grad.full_tensor() - q.grad).abs().max() / q.grad.abs().max())
        for (name, p), q in zip(model.named_parameters(), single.parameters(), strict=True)
    }


@pytest.mark.parametrize("layout", PLANS)
def test_collectives_of_a_model_see_one_device(rank_pool: RankPool, layout: str) -> None:
    for differences in rank_pool.run(2, one_and_parallel, layout, timeout=60):
        assert max(differences.values()) < 1e-5, differences


class KeepsGroup(Communicates):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        mean = self.blocks[0].linear(x).mean()
        dist.all_reduce(mean, group=self.group)
        return mean


class MakesGroup(Communicates):
    def forward(self, x: Tensor) -> Tensor:
        dist.new_group([0])
        return super().forward(x)


def refusals(rank: int, size: int) -> list[str]:
    told = []
    x = torch.randn(4, WIDTH)
    for model, planned in (
        (KeepsGroup(dist.group.WORLD), False),
        (KeepsGroup(dist.group.WORLD), True),
        (MakesGroup(), False),
    ):
        try:
            if planned:
                mw.auto_parallelize(model, x, cluster="laptop-cpu", dp=1, tp=2)
            else:
                mw.parallelize(model, ParallelPlan(world_size=size, **PLANS["tp2"]))(x)
        except MeshwrightError as error:
            told.append(str(error))
    return told


def test_groups_of_a_model_are_refused(rank_pool: RankPool) -> None:
    for by_hand, planned, made in rank_pool.run(2, refusals, timeout=120):
        assert by_hand.startswith("the model calls torch.distributed (all_reduce) with a process group")
        assert planned.startswith(
            "module 'the model' calls torch.distributed (allreduce) with a process group"
        )
        assert "new_group is called inside of a parallel model" in made
