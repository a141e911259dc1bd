"""`mw.reshard`: a model in training goes from one plan to another, in memory."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.reshard.in_memory import LiveState
from meshwright_dtensor.devices import HOST, device_of
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.mesh.mesh import destroy_groups, init, restrict_world, set_default_world
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.utils.names import count_of, listing
from meshwright_parallel import parallelize
from meshwright_parallel.placement.unparallelize import drop_values, unparallelize
from meshwright_parallel.ranks import check_plans

M = TypeVar("M", bound=nn.Module)
O = TypeVar("O", bound=torch.optim.Optimizer | None)  # noqa: E741


def reshard(model: M, optimizer: O, plan: ParallelPlan) -> tuple[M, O]:
    """Put a parallel model and its optimizer on another plan, in place and in memory (a collective call).

    Parameters, buffers and optimizer states keep their values bit for bit. Only data that changes its rank is sent, tensor by
    tensor, and the old shard of each is freed before the next. Besides the state itself this takes some 150 MB and
    the new shard of one tensor.

    The plan may be for another number of ranks. For fewer, ranks 0 to n-1 go on as the whole world (the default process group
    is theirs afterwards) and the others keep nothing and should end. For more, start the new ranks, make a default process
    group of all, and call this on every rank, on new ones with a model and optimizer just built.

    Args:
        model: a model that `parallelize` has put on a plan. On a rank that joins, the same model without a plan.
        optimizer: over its parameters, or None. It goes on as it is, with the new parameters in its groups: schedulers that
            refer to it need not be made anew.
        plan: what to go to.

    Returns:
        `model` and `optimizer`, the objects given.

    Raises:
        PlanError: the plan does not fit the model or the ranks. Nothing has been changed.
        UsageError: no rank's model is on a plan, a gradient is there (call `zero_grad()` first), or ranks differ in their
            plans or optimizers. Nothing has been changed.
    """
    device = init()
    ranks = Ranks()
    old = getattr(model, "parallel_plan", None)
    told = ranks.gather([old is not None, optimizer is not None])
    check_plans(plan)
    if plan.world_size > ranks.size:
        rule = f"there are {count_of(ranks.size, 'rank')}; start more, and make a default process group of all of them first"
        raise PlanError("world_size", plan.world_size, rule, str(ranks.size))
    if not any(there for there, _ in told):
        kind = type(model).__name__
        raise UsageError(f"this {kind} is on no plan; call parallelize() or auto_parallelize() first")
    _check_optimizers([has for _, has in told])
    state = ranks.run_checked(lambda: LiveState.of(model, optimizer) if old is not None else LiveState())
    trained = {name: flag for flags in ranks.gather(state.trained) for name, flag in flags.items()}
    off = unparallelize(model) if old is not None else drop_values(model)
    stays = ranks.rank < plan.world_size
    everyone = dist.group.WORLD
    try:
        if stays:
            for name, parameter in model.named_parameters(remove_duplicate=False):
                parameter.requires_grad_(trained.get(name, parameter.requires_grad))
        _share_random_state(ranks, [there for there, _ in told], device)
        ranks.run_checked(lambda: _apply(model, plan, ranks))
        agreed = state.check(model, optimizer, ranks=ranks, here=stays)
    except BaseException:
        off.restore()
        if everyone is not None and dist.group.WORLD is not everyone:
            set_default_world(everyone)
        raise
    groups = off.groups - ({everyone} if everyone is not None else set())
    del off
    # what the old plan has gathered: its engines hold it, and old parameters hold them
    for tensor in state.free.values():
        if isinstance(tensor, MeshParameter):
            tensor.compute_with(None)
    gc.collect()
    agreed.fill()
    destroy_groups(groups)
    return model, optimizer


def _check_optimizers(given: Sequence[bool]) -> None:
    """Raise UsageError if some ranks have an optimizer and others have none."""
    having, lacking = ([rank for rank, has in enumerate(given) if has == each] for each in (True, False))
    if having and lacking:
        raise UsageError(
            f"reshard() was given an optimizer on ranks {listing(map(str, having), 8)}, and none on ranks "
            f"{listing(map(str, lacking), 8)}; give it on all or on none"
        )


def _apply(model: nn.Module, plan: ParallelPlan, ranks: Ranks) -> None:
    """Apply the plan on its ranks, which are the whole world from now on."""
    if plan.world_size == ranks.size or restrict_world(plan.world_size) is not None:
        parallelize(model, plan)


def _share_random_state(ranks: Ranks, there: list[bool], device: torch.device) -> None:
    """Ranks that join draw the same numbers as those that were there, on the CPU and on their device."""
    if all(there):
        return

    def shared(state: torch.Tensor) -> torch.Tensor:
        state = state.to(ranks.device)
        dist.broadcast(state, src=there.index(True), group=ranks.group)
        return state.to(HOST)

    torch.set_rng_state(shared(torch.get_rng_state()))
    generator = device_of(device).generator(device)
    if generator is not torch.default_generator:
        generator.set_state(shared(generator.get_state()))
