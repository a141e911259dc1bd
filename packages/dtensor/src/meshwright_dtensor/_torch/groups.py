"""Process groups and the store that they were made by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, _redistribute

from meshwright_dtensor._torch.axis_groups import groups_of_this_rank
from meshwright_dtensor._torch.one_rank import OneRank


def _options_of(op: Any) -> Any:
    options = dist.AllreduceOptions()  # type: ignore[attr-defined]
    options.reduceOp, options.asyncOp = op, False
    return options


_ALL_REDUCE = {op: _options_of(op) for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN)}


def all_reduce_(t: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Overwrite contiguous `t` with the reduction over the ranks: `dist.all_reduce`, which checks its arguments for 1.4 us."""
    options = None if t.is_complex() else _ALL_REDUCE.get(op)
    if options is None:
        dist.all_reduce(t, op, group=group)
        return
    work = group.allreduce([t], options)
    if work is not None:
        work.wait()


def fake_store() -> Any:
    """A store for the "fake" backend, whose collectives do nothing; the import registers it."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    return FakeStore()


def hash_store() -> Any:
    """A rendezvous inside this process, for a world of one."""
    return dist.HashStore()  # type: ignore[attr-defined]


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()  # type: ignore[attr-defined]


def set_timeout(seconds: float) -> None:
    """How long an operation of the default process group may wait for other ranks."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds))


def timeouts() -> set[timedelta]:
    """How long the backends of the default process group wait; torch's own defaults for several backends differ."""
    world = dist.distributed_c10d._get_default_group()
    backends = [world._get_backend(device) for device in world._device_types]
    # fake groups have no options
    options = [getattr(backend, "options", None) for backend in backends]
    return {each._timeout for each in options if each is not None}


@contextmanager
def _timeout_of_world() -> Iterator[None]:
    """Inside, groups are made with the timeout of the default group: messages of gloo between two ranks know no later one."""
    c10d: Any = dist.distributed_c10d
    before = c10d._get_default_timeout
    if len(of_backends := timeouts()) == 1:
        (timeout,) = of_backends
        c10d._get_default_timeout = lambda backend: timeout
    try:
        yield
    finally:
        c10d._get_default_timeout = before


def new_group(ranks: Sequence[int], backend: str | None = None, description: str | None = None) -> Any:
    """A group of these ranks, or on other ranks what torch gives them (a collective call of all ranks)."""
    with _timeout_of_world():
        return dist.new_group(list(ranks), backend=backend, group_desc=description)


def new_mesh(device: str, sizes: Sequence[int], names: Sequence[str]) -> DeviceMesh:
    """A mesh of all ranks, in the order of their numbers."""
    with _timeout_of_world(), groups_of_this_rank():
        return init_device_mesh(device, tuple(sizes), mesh_dim_names=tuple(names))


def flattened_group(mesh: DeviceMesh, axes: tuple[str, ...]) -> dist.ProcessGroup:
    """The process group over the product of several mesh axes; made on first use, so every rank must call this."""
    # the mesh keeps it
    with _timeout_of_world(), groups_of_this_rank():
        return mesh[axes]._flatten().get_group()


def message_device_type(group: dist.ProcessGroup | None) -> str:
    """The type of device on which small messages between the ranks of a group are: "cpu" where its backends allow."""
    return str(dist.distributed_c10d._get_object_coll_device(group))


def set_default_group(group: dist.ProcessGroup) -> None:
    """Make `group` the one that collective calls without a group use."""
    dist.distributed_c10d._update_default_pg(group)  # type: ignore[no-untyped-call]


def live_groups() -> list[dist.ProcessGroup]:
    """The process groups of this rank, oldest first."""
    return [group for group in dist.distributed_c10d._world.pg_map if not isinstance(group, OneRank)]


def forget_meshes() -> None:
    """Clear DTensor's caches of sharding propagation and redistribution.

    They keep meshes alive with their process groups, and return them for an equal mesh whose groups are new.
    """
    # what torch.distributed.tensor.debug does, whose import takes half a second
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()  # type: ignore[attr-defined]
    torch._C._clear_DTensor_sharding_propagator_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()


def forget_failed_join() -> None:
    """Reset torch's count of groups after a failed start-up, so that the next default group has its usual name.

    torch resets the count only when a default group is destroyed.  Without this, a rank whose peer left during start-up
    would wait for its peers under another name for ever.
    """
    if not dist.is_initialized():
        dist.distributed_c10d._world.group_count = 0
