"""A process group of this rank alone, whose collectives only copy, and the state of torch.distributed that hands it out."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed import distributed_c10d as c10d
from torch.distributed.nn import functional as differentiable

ONE_DEVICE = "meshwright_one_device"
"""The name of the group of this rank alone."""


class _Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: Any = None) -> bool:
        """Return at once."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed


def _copy(targets: Any, sources: Any, opts: Any = None) -> _Done:
    """Copy tensors one by one. Dispatched as calls of users are: global tensors may differ in their layouts."""
    _refuse_factor(opts)
    with torch._C._EnableTorchFunction(), torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.reshape(target.shape))
    return _Done()


def _refuse_factor(opts: Any) -> None:
    if getattr(opts, "reduceOp", None) == dist.ReduceOp.PREMUL_SUM:
        raise NotImplementedError("a sum with factors (PREMUL_SUM) inside of a parallel model")


# as Any: the signatures of the base class are those of its C++ methods
_ProcessGroup: Any = dist.ProcessGroup


class OneRank(_ProcessGroup):  # type: ignore[misc]
    """Rank 0 of 1. Takes tensors of any kind, fake and global ones too."""

    def __init__(self) -> None:
        super().__init__(0, 1)

    @property
    def group_name(self) -> str:
        """The name by which functional collectives look groups up."""
        return ONE_DEVICE

    def allreduce(self, tensors: Any, opts: Any = None) -> _Done:
        """The sum, mean, ... of one value is that value."""
        _refuse_factor(opts)
        return _Done()

    allreduce_coalesced = reduce = broadcast = allreduce

    def barrier(self, opts: Any = None) -> _Done:
        """No other rank is waited for."""
        return _Done()

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        """outputs[i][0] = inputs[i]."""
        return _copy([each[0] for each in outputs], inputs)

    gather = allgather

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        """outputs[i] = inputs[i][0]."""
        return _copy(outputs, [each[0] for each in inputs], opts)

    reduce_scatter = scatter

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> _Done:
        """outputs[i] = inputs[i]."""
        return _copy(outputs, inputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced = alltoall
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced = alltoall

    def all_gather_single(self, output: Any, input: Any, *sizes_and_opts: Any) -> _Done:
        """output = input."""
        return _copy([output], [input], *sizes_and_opts[-1:])

    reduce_scatter_single = all_to_all_single = alltoall_base = all_gather_single
    _allgather_base = _reduce_scatter_base = all_gather_single


class _World(c10d._World):
    """The state of torch.distributed; which default group it shows depends on who asks."""

    alone: Callable[[], bool]
    one_rank: OneRank

    @property
    def default_pg(self) -> Any:
        group: Any = self._default_pg
        if group is None or not self.alone():
            return group
        alone = self.one_rank
        world: Any = self
        if alone not in world.pg_map:
            # not when it is made: destroying all groups forgets it
            world.pg_map[alone], world.pg_names[alone] = world.pg_map[group], ONE_DEVICE
            world.pg_group_ranks[alone] = {0: 0}
            register: Any = torch._C._distributed_c10d._register_process_group
            register(ONE_DEVICE, alone)
        return alone

    @default_pg.setter
    def default_pg(self, group: Any) -> None:
        self._default_pg = group


def install_world(alone: Callable[[], bool], refuse: Callable[[Any], None]) -> None:
    """Let torch.distributed use the group of this rank alone as the default one where `alone()`; idempotent.

    refuse: called with the group of each call that names one, before it communicates.
    """
    world: Any = c10d._world
    if isinstance(world, _World):
        return
    world.alone, world.one_rank, world.__class__ = alone, OneRank(), _World
    _forget_default_groups()
    by_name: Any = torch._C._distributed_c10d._resolve_process_group
    is_outside, resolve = c10d._rank_not_in_group, functional._resolve_group

    # all functions of torch.distributed ask this first
    def rank_not_in_group(group: Any) -> bool:
        refuse(group)
        return is_outside(group)

    # all functional collectives ask this first
    def resolve_group(group: Any, tag: str = "") -> Any:
        resolved = resolve(group, tag)
        refuse(by_name(resolved) if isinstance(resolved, str) else resolved)
        return resolved

    setattr(c10d, is_outside.__name__, rank_not_in_group)
    setattr(functional, resolve.__name__, resolve_group)


def _forget_default_groups() -> None:
    """Let torch.distributed.nn ask for the default group when it is called.

    Its default arguments are the group that there was when it was imported: None before there was one.
    """
    for function in vars(differentiable).values():
        if isinstance(function, FunctionType) and (kept := function.__defaults__):
            function.__defaults__ = tuple(None if isinstance(it, dist.ProcessGroup) else it for it in kept)


def has_group() -> bool:
    """Whether there is a default process group, whoever asks."""
    return c10d._world._default_pg is not None
