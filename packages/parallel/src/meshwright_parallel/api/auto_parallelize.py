"""Plan and apply in one call."""

from __future__ import annotations

from typing import Any, Unpack

import torch
import torch.distributed as dist
from torch import nn

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor._torch.modes import recordable, without_inference_mode
from meshwright_dtensor.errors import portable
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.model.compiled import Uncompiled
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost
from meshwright_dtensor.stored.gather import whole_value
from meshwright_dtensor.strategy import PlanKeywords, PlanRequest, with_plan_keywords
from meshwright_parallel.api.parallelize import parallelize
from meshwright_parallel.ranks import same_plugins
from meshwright_parallel.validation.checks import check_model


@with_plan_keywords
@without_inference_mode()
def auto_parallelize(
    model: nn.Module, batch: Any, *, plugins: PluginHost | None = None, **keywords: Unpack[PlanKeywords]
) -> nn.Module:
    """Plan for this model, batch and job with an installed planner, and apply the best plan in place.

    Args:
        model, batch, plugins: as for `parallelize`; the batch is an example, the same on every rank.
        {keywords}

    Returns:
        `model`; `model.parallel_plan` holds the plan. The first rank plans, and every rank applies its plan.

    Raises:
        InfeasibleError, UsageError, PlanError, PluginError: as `plan` and `parallelize` do, on every rank.
    """
    init()
    host = same_plugins(plugins)
    taken = Uncompiled(model)
    model = taken.model
    if taken.patterns and keywords.get("compile") is None:
        keywords["compile"] = taken.patterns
    check_model(model)
    if keywords.get("world_size") is None:
        keywords["world_size"] = dist.get_world_size()
    request = PlanRequest.of(keywords)
    request.check(sorted({registered.record.axis for registered in host.strategies().values()}))
    planner = host.get(PlannerSpec, request.planner)
    with torch.no_grad():
        # the first rank alone reads it when it plans; a batch of `shard_loader` is on all ranks
        batch = pytree.tree_map(whole_value, batch)
    result: list[Any] = [None]
    if dist.get_rank() == 0:
        with torch.random.fork_rng(devices=()):
            try:
                result = [planner.load()().plan(model, recordable(batch), request)[0].to_json()]
            except Exception as error:
                # the other ranks wait for a result in any case
                result = [portable(error)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(result, src=0)
    if isinstance(result[0], BaseException):
        raise result[0]
    return parallelize(model, ParallelPlan.from_json(result[0]), batch=batch, plugins=host)
