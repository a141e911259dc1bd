"""Plans that the first rank makes for all, as `auto_parallelize` makes them: four ranks share two cores here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import meshwright as mw
from meshwright_dtensor.plan import ParallelPlan


def one_and_many(
    make: Callable[[], nn.Module], batch: Any, plan: ParallelPlan | None = None, **options: Any
) -> list[Any]:
    """A model of one device, and the same on this world (a collective call), by `plan` or by that of `plan_once`."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(make())
    mw.parallelize(models[1], plan or plan_once(models[1], batch, cluster="laptop-cpu", **options))
    return models


def plan_once(model: nn.Module, batch: Any, **options: Any) -> ParallelPlan:
    """The best plan of `mw.plan` for this world, on every rank (a collective call)."""
    told = [""]
    if dist.get_rank() == 0:
        plan = mw.plan(model, batch, world_size=dist.get_world_size(), **options)
        assert isinstance(plan, ParallelPlan)
        told = [plan.to_json()]
    dist.broadcast_object_list(told, src=0)
    return ParallelPlan.from_json(told[0])
