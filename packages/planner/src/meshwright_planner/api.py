"""`plan`: the planner's front door."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from torch import nn

from meshwright_dtensor.cluster.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import PlannerSpec, discover
from meshwright_dtensor.strategy.planner import PlanRequest


def plan(
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
) -> ParallelPlan | list[ParallelPlan]:
    """Find how to lay `model` over the ranks of a cluster. The model is run once on fake tensors and left untouched.

    Args:
        model: any module; its parameters may be on the meta device.
        batch: one example of the GLOBAL batch: a dict of keyword arguments, a tuple of arguments, or a tensor.
        cluster: name of a registered cluster, path of a `.json` file of one, a Cluster, or None for the machine at hand.
        world_size: number of ranks; None takes that of the running job, 1 where there is none.
        planner: name of a registered planner.
        cost_model: name of a registered cost model ("roofline", "measured", or of a plugin); None takes what was measured of
            the cluster, and its datasheet where nothing was.
        optimizer: "adamw", "adam", "sgd" or "sgd-momentum".
        global_batch_size: rows of the global batch, when the example has another number.
        top_k: return a list of at most this many plans, best first, when greater than 1.
        memory_limit: bytes that a plan may use on one rank, or text such as "40GiB"; None takes what the cluster has.
        time_budget: seconds after which no further configuration is looked at, once one is known that fits; then equal
            requests need not give equal plans. None searches to the end.
        tp, pp, cp, ep: degrees to keep as given; None is searched.
        dp: data ranks to keep as given (the product of the axes dp and zero).
        degrees: axis -> degree to keep as given, for axes of installed strategies that have no keyword here.
        context_attention: how ranks of cp share attention: "all_gather", "ring" or "all_to_all"; None takes the cheapest.
        context_balance: "zigzag" or "none"; None takes zig-zag for causal models.
        zero: ZeRO stage, 1 to 3, or 0 for none; None searches for it, but with `dp` given only where nothing else fits.
        zero_degree: how many data ranks share one copy of the training state; all of them by default.
        precision: "bf16", "fp16" or "fp32": what a float32 model is computed in.
        recompute: "full", "alternate" or "selective" for every repeated block (see plan.RecomputeRule), or a pattern of module
            names, recomputed in full; None takes it up where nothing else fits the memory, in a pipeline stage by stage.
        sequence_parallel: True has tp split the sequence between blocks, False forbids it, None takes what is cheaper.
        microbatches: equal parts that a pipeline (pp) cuts the batch into; None is searched.
        schedule: name of a registered pipeline schedule; None searches all that are installed.
        compile: refused, nothing executes it yet.
        keep_user_sharding: keep parameters where `mark_sharding` put them, and plan around that; False searches freely.

    Returns:
        The best plan, or with top_k > 1 a list, best first.

    Raises:
        UsageError: an option cannot be had, or the model does not take the batch.
        InfeasibleError: nothing fits; the message says by how much and what would.
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"model is a {type(model).__name__}; give a torch.nn.Module")
    request = PlanRequest(
        cluster=cluster,
        world_size=world_size,
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
    plans = discover().get(PlannerSpec, planner).load()().plan(model, batch, request)
    return plans if top_k > 1 else plans[0]
