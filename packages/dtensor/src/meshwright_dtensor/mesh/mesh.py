"""Process groups and device meshes: start-up from torchrun's environment, the mesh of a plan, and ending groups."""

from __future__ import annotations

import atexit
import math
import os
import sys
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor._torch.groups import (
    flattened_group,
    forget_meshes,
    hash_store,
    live_groups,
    new_group,
    new_mesh,
    set_default_group,
    set_timeout,
    timeouts,
)
from meshwright_dtensor._torch.modes import without_functorch
from meshwright_dtensor.devices import HOST, Device, default_device, device_of, is_known, types_here
from meshwright_dtensor.devices.waits import waiting
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.mesh.deadlock import watch_for_deadlocks
from meshwright_dtensor.mesh.error_report import report_to_torchrun
from meshwright_dtensor.mesh.start_store import start_store
from meshwright_dtensor.utils.names import count_of, listing
from meshwright_dtensor.utils.process import settle_at_exit

if TYPE_CHECKING:
    from meshwright_dtensor.plan.plan import ParallelPlan


_CONTROL = "meshwright control"
"""Description of the group of `control_group`."""


def init(
    device: str | None = None, *, timeout: float | None = None, deterministic: bool = False
) -> torch.device:
    """Join the process group that torchrun describes, or make a world of one rank; every entry point calls it.

    Args:
        device: a type of device, such as ``"cpu"``, ``"cuda"`` or ``"xpu"``: any that torch knows and has a backend of collectives
            for, or that a plugin brings (`meshwright_devices`). By default the accelerator of this process (`torch.accelerator`)
            where there is one, else the CPU.
        timeout: seconds that a collective waits for other ranks before it fails; by default torch's, half an hour (NCCL: ten
            minutes). All groups that are made from now on have that of the world.
        deterministic: equal inputs give equal bits from now on, in this run and in the next one on the same plan:
            `torch.use_deterministic_algorithms`, and cuDNN and cuBLAS without a choice of their own. An operation of torch that
            cannot raises RuntimeError. It may cost time.

    Returns:
        The device of this rank.

    Raises UsageError: the device type is not available here, or has fewer devices than ranks were started; the timeout is not
    above 0.
    """
    if timeout is not None and not timeout > 0:
        raise UsageError(f"timeout={timeout!r} is no time that a collective can wait; give seconds above 0")
    if deterministic:
        # cuBLAS reads it when it is first used
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    record = _record(device)
    index = int(os.environ.get("LOCAL_RANK", "0"))
    if not record.on_host and index >= record.count():
        raise UsageError(
            f"this is rank {index} of its host (LOCAL_RANK), which has {count_of(record.count(), f'{record.name} device')}; "
            f"start one rank a device (torchrun --nproc-per-node {record.count()}), or use device='cpu'"
        )
    settle_at_exit()
    if not dist.is_initialized():
        _join(record, timeout)
    if timeout is not None:
        set_timeout(timeout)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        report_to_torchrun()
        watch_for_deadlocks()
    return record.select(index)


def _record(kind: str | None) -> Device:
    """The record of the type of device that is asked for, or of the one to use by default. Raises UsageError."""
    if kind is None:
        record = default_device()
        # a world that was made for the CPU stays there
        of_cpu = dist.is_initialized() and backend_of(None, record.name) is None
        return device_of(HOST) if of_cpu else record
    if not is_known(kind):
        raise UsageError(
            f"device {kind!r} is no type of device that torch or a plugin has; use one of those here, {listing(types_here())}"
        )
    record = device_of(kind)
    if not record.available():
        raise UsageError(
            f"device={kind!r} is requested, and there is none here; use one of those here, {listing(types_here())}"
        )
    if record.backend() is None:
        raise UsageError(
            f"device={kind!r} is requested, and torch.distributed has no backend for its tensors; register one "
            f"(torch.distributed.Backend.register_backend), install the plugin of the device, or use device='cpu'"
        )
    return record


def _join(record: Device, timeout: float | None) -> None:
    """Make the default process group."""
    given: dict[str, Any] = {} if timeout is None else {"timeout": timedelta(seconds=timeout)}
    backend = record.start_backend()
    if not record.on_host:
        atexit.register(_end_groups)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, **start_store(), **given)
    else:
        dist.init_process_group(backend, store=hash_store(), rank=0, world_size=1, **given)


def _end_groups() -> None:
    """NCCL warns of groups that are left at exit. After an error, other ranks may be gone, and ending them could wait for ever."""
    if dist.is_initialized() and not hasattr(sys, "last_value"):
        dist.destroy_process_group()


def build_mesh(plan: ParallelPlan, device: str | None = None) -> DeviceMesh:
    """The device mesh of ``plan``, an axis per degree. Raises PlanError if the degrees do not multiply to the world size."""
    here = init(device)
    world = dist.get_world_size()
    product = math.prod(plan.degrees.values())
    if product != world:
        raise PlanError(
            "degrees",
            dict(plan.degrees),
            f"they multiply to {product}, and must to the world size, {world}",
            f"run on {count_of(product, 'rank')}, or plan for world_size={world}",
        )
    return new_mesh(here.type, list(plan.degrees.values()), list(plan.degrees))


def group_over(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """The process group of the ranks that differ from this rank on `axes` only (names of mesh axes, in mesh order).

    With several axes, the first call makes the group and is collective: every rank of the mesh must make it.
    """
    return mesh.get_group(axes[0]) if len(axes) == 1 else flattened_group(mesh, tuple(axes))


def backend_of(group: dist.ProcessGroup | None, device: str) -> str | None:
    """The backend that moves tensors of a type of device between the ranks of a group, None for all ranks; None for none."""
    return _backends(group).get(device)


def _backends(group: dist.ProcessGroup | None) -> dict[str, str]:
    """Type of device -> the backend for its tensors."""
    config: str = dist.get_backend_config(group)
    return dict(part.split(":") for part in config.split(","))


def message_device(group: dist.ProcessGroup | None) -> torch.device:
    """Where small messages between the ranks of a group are: the CPU, if its backends move tensors of the CPU.

    A message on an accelerator waits for all that was launched there before.
    """
    if backend_of(group, HOST.type) is not None:
        return HOST
    return device_of(next(iter(_backends(group)))).current()


def check_sends(group: dist.ProcessGroup, device: torch.device, what: str) -> None:
    """Raises UsageError if the ranks of a group cannot send each other tensors of this device, as `what` does."""
    record, backend = device_of(device), backend_of(group, device.type)
    if not record.sends(backend):
        raise UsageError(
            f"{what} sends tensors from rank to rank, and {backend} does so for the CPU only, not for {device.type}; let mw.init() "
            f"make the process group, or init_process_group({record.start_backend()!r}), or plan without it"
        )


def extremes(values: Sequence[int], group: dist.ProcessGroup | None) -> list[tuple[int, int]]:
    """Least and largest of each value over the ranks of a group, None for all ranks (a collective call)."""
    group = control_group() if group is None else group
    device = message_device(group)
    # transforms of the caller (vmap) have no rules for collectives
    with without_functorch():
        both = torch.tensor([*values, *(-value for value in values)], dtype=torch.int64, device=device)
        with waiting():
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        largest, negated = both.view(2, -1).tolist()
    return [(-low, high) for low, high in zip(negated, largest, strict=True)]


def timeout_of_world() -> float:
    """Seconds that a collective waits for other ranks: the longest of the backends; without a process group forever."""
    waits = timeouts() if dist.is_initialized() else ()
    return max((each.total_seconds() for each in waits), default=math.inf)


def control_group() -> dist.ProcessGroup:
    """All ranks, in a group for messages of this framework alone (the first call is collective).

    In the default group a message would meet a collective of the user that one rank has left out: gloo aborts at such a pair, or
    both get wrong numbers. In groups of their own both wait, and the deadlock is reported.
    """
    world = dist.group.WORLD
    assert world is not None
    if dist.get_backend(world) == "fake":
        return world
    return _group_of_world(_CONTROL, None)


def host_group(description: str) -> dist.ProcessGroup:
    """All ranks, in a group of that description that sends tensors of the host (the first call is collective).

    For one thread that sends while others use other groups.
    """
    return _group_of_world(description, "gloo")


def _group_of_world(description: str, backend: str | None) -> dist.ProcessGroup:
    """The group of all ranks with a description, which the first call makes. `backend`: None for that of the world."""
    ranks = dist.get_process_group_ranks(dist.group.WORLD)
    for group in live_groups():
        if group.group_desc == description and dist.get_process_group_ranks(group) == ranks:
            return group
    made: dist.ProcessGroup = new_group(ranks, backend, description)
    return made


def restrict_world(size: int) -> dist.ProcessGroup | None:
    """Make ranks 0 to `size` - 1 the default process group (a collective call). None on all other ranks, which keep theirs."""
    group = new_group(range(size))
    if dist.get_rank() >= size:
        return None
    set_default_group(group)
    return group


def set_default_world(group: dist.ProcessGroup) -> None:
    """Make `group` the default process group, on its ranks."""
    set_default_group(group)


def live_process_groups() -> frozenset[dist.ProcessGroup]:
    """The process groups that exist on this rank."""
    return frozenset(live_groups()) if dist.is_initialized() else frozenset()


def destroy_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """Destroy process groups that are not used any more; skip destroyed groups and the default group."""
    alive = live_process_groups()
    for group in groups:
        if group in alive and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    forget_meshes()
