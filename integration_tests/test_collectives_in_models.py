"""A model's own calls of torch.distributed see one device; those of the loop around it communicate."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import meshwright as mw
from meshwright_dtensor.errors import MeshwrightError
from meshwright_dtensor.plan import ParallelPlan, PipelineRule
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_dtensor.trace.one_device import on_one_device, show_one_device

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


def test_collectives_of_a_model_see_one_device() -> None:
    # torch.distributed.nn keeps the default group of the process in which it was imported first
    with RankPool() as pool:
        for layout in PLANS:
            for differences in pool.run(2, one_and_parallel, layout, timeout=60):
                assert max(differences.values()) < 1e-5, (layout, differences)


class KeepsGroup(Communicates):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        mean = self.blocks[0].linear(x).mean()
        dist.all_reduce(mean, group=self.group)
        return mean


class AsksGroup(Communicates):
    """Exchanges over rank 0 and 1 in one of the ways to name them."""

    def __init__(self, form: str) -> None:
        super().__init__()
        world = dist.group.WORLD
        assert world is not None
        self.form, self.name, self.mesh = form, world.group_name, init_device_mesh("cpu", (2,))
        self.group = world

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0].linear(x).mean()
        if self.form == "plain":
            assert dist.get_world_size(self.group) == 2
            dist.all_reduce(plain := torch.ones(()), group=self.group)
            return y * plain
        if self.form == "operation":
            summed: Tensor = torch.ops._c10d_functional.all_reduce(y, "sum", self.name)
            return torch.ops._c10d_functional.wait_tensor(summed)  # type: ignore[no-any-return]
        named = {"mesh": self.mesh, "name": self.name, "ranks": [0, 1], "plain functional": self.mesh}[
            self.form
        ]
        return y * functional.all_reduce(torch.ones(()) if "plain" in self.form else y, "sum", named)


NAMED = ("plain", "operation", "mesh", "name", "ranks", "plain functional")


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
        *((AsksGroup(form), False) for form in NAMED),
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
    for by_hand, planned, made, *named in rank_pool.run(2, refusals, timeout=120):
        for told in (by_hand, *named):
            assert told.startswith("the model calls torch.distributed (all_reduce) with a process group")
        assert len(named) == len(NAMED)
        assert planned.startswith(
            "module 'the model' calls torch.distributed (allreduce) with a process group"
        )
        assert "new_group is called inside of a parallel model" in made


PLUGIN = """
import torch
import torch.distributed as dist

def hook(module, arguments):
    dist.all_reduce(total := torch.ones(()))
    module.seen = dist.get_rank(), int(total)

class Strategy:
    pass
"""


def strategy_hooks(rank: int, size: int) -> list[Any]:
    """What a hook of a strategy's package, code without a module name and the model see."""
    package = {"__name__": "another_name.hooks"}
    exec(PLUGIN, package)
    package["Strategy"].__module__ = "another_name.strategy"  # type: ignore[attr-defined]
    model = Communicates()
    show_one_device(model, [package["Strategy"]()])  # type: ignore[operator]
    model.register_forward_pre_hook(package["hook"])  # type: ignore[arg-type]
    model(torch.randn(4, WIDTH))
    nameless: dict[str, Any] = {}
    exec("import torch.distributed as d; rank = d.get_rank()", nameless)
    return [model.seen == (rank, size), nameless["rank"] == rank]


def test_strategies_of_other_packages_see_all_ranks(rank_pool: RankPool) -> None:
    assert rank_pool.run(2, strategy_hooks, timeout=60) == [[True, True]] * 2


IMPORTED_LATE = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
import torch.distributed.nn.functional as differentiable
from meshwright_dtensor.trace.one_device import show_one_device

class Model(torch.nn.Module):
    def forward(self, x):
        return differentiable.all_reduce(x) + differentiable.all_gather(x)[0]

show_one_device(model := Model())
assert torch.equal(model(torch.ones(3)), torch.full((3,), 2.0))
"""


def test_functions_imported_when_there_is_a_group_see_one_device() -> None:
    arguments = [sys.executable, "-W", "ignore::FutureWarning", "-c", IMPORTED_LATE]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
