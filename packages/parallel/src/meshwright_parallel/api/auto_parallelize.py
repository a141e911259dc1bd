"""Plan and apply in one call."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright_dtensor.cluster.cluster import Cluster
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, PluginHost
from meshwright_dtensor.strategy.planner import PlanRequest
from meshwright_parallel.api.parallelize import parallelize
from meshwright_parallel.ranks import generator_kept, same_plugins
from meshwright_parallel.validation.checks import check_model


def auto_parallelize(
    model: nn.Module,
    batch: Any,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    world_size: int | None = None,
    planner: str = "eager",
    cost_model: str | None = None,
    optimizer: str = "adamw",
    global_batch_size: int | None = None,
    precision: str | None = None,
    top_k: int = 1,
    memory_limit: int | str | None = None,
    time_budget: float | None = None,
    tp: int | None = None,
    pp: int | None = None,
    dp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    degrees: Mapping[str, int] | None = None,
    context_attention: str | None = None,
    context_balance: str | None = None,
    zero: int | None = None,
    zero_degree: int | None = None,
    sequence_parallel: bool | None = None,
    microbatches: int | None = None,
    schedule: str | None = None,
    recompute: str | None = None,
    compile: str | bool | None = None,
    keep_user_sharding: bool = True,
    plugins: PluginHost | None = None,
) -> nn.Module:
    """Plan for this model, batch and job with an installed planner, and apply the best plan in place.

    Args:
        model, batch, plugins: as for `parallelize`; the batch is an example, the same on every rank.
        the others: as for `plan` (see `meshwright_dtensor.strategy.planner.PlanRequest`). `world_size` is that of the job.

    Returns:
        `model`; `model.parallel_plan` holds the plan. The first rank plans, and every rank applies its plan.

    Raises:
        InfeasibleError, UsageError, PlanError, PluginError: as `plan` and `parallelize` do, on every rank.
    """
    init()
    host = same_plugins(plugins)
    check_model(model)
    request = PlanRequest(
        cluster=cluster,
        world_size=dist.get_world_size() if world_size is None else world_size,
        planner=planner,
        cost_model=cost_model,
        optimizer=optimizer,
        global_batch_size=global_batch_size,
        precision=precision,
        top_k=top_k,
        memory_limit=memory_limit,
        time_budget=time_budget,
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=ep,
        degrees={} if degrees is None else degrees,
        context_attention=context_attention,
        context_balance=context_balance,
        zero=zero,
        zero_degree=zero_degree,
        sequence_parallel=sequence_parallel,
        microbatches=microbatches,
        schedule=schedule,
        recompute=recompute,
        compile=compile,
        keep_user_sharding=keep_user_sharding,
    )
    request.check(sorted({registered.record.axis for registered in host.strategies().values()}))
    found = host.get(PlannerSpec, planner)
    told: list[Any] = [None]
    if dist.get_rank() == 0:
        with generator_kept():
            try:
                told = [found.load()().plan(model, batch, request)[0].to_json()]
            except Exception as error:  # the others wait for an answer, whatever it is
                told = [_portable(error)]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(told, src=0)
    if isinstance(told[0], BaseException):
        raise told[0]
    return parallelize(model, ParallelPlan.from_json(told[0]), batch=batch, plugins=host)


def _portable(error: Exception) -> Exception:
    """The error, or what it says where it cannot be sent to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever a foreign error does when it is packed
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
