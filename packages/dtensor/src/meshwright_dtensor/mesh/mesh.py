"""Start-up and meshes: the process group from torchrun's environment, and the mesh of a plan.

The mesh that is meant where a call names none.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement

from meshwright_dtensor._torch.core import (
    entered_mesh,
    flattened_group,
    hash_store,
    live_groups,
    set_default_group,
)
from meshwright_dtensor._torch.meshes import forget_meshes
from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.utils.shutdown import settle_at_exit

if TYPE_CHECKING:
    from meshwright_dtensor.plan.plan import ParallelPlan


def init(device: str | None = None) -> torch.device:
    """Join the process group that torchrun describes, or make a world of one; every entry point calls it.

    Args:
        device: ``"cpu"`` or ``"cuda"``; by default cuda where there is one, else cpu.

    Returns:
        The device of this rank.

    Raises:
        UsageError: the device type is not available here.
    """
    kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is not known; use 'cpu' or 'cuda'")
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "device 'cuda' was asked for, but torch.cuda.is_available() is False here; use device='cpu'"
        )
    settle_at_exit()
    if not dist.is_initialized():
        backend = "nccl" if kind == "cuda" else "gloo"
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=hash_store(), rank=0, world_size=1)
    if kind == "cuda":
        index = int(os.environ.get("LOCAL_RANK", "0"))
        torch.cuda.set_device(index)
        return torch.device("cuda", index)
    return torch.device("cpu")


def build_mesh(plan: ParallelPlan, device: str | None = None) -> DeviceMesh:
    """The device mesh of ``plan``: one axis per degree, in the plan's order, outermost first.

    Raises:
        PlanError: the degrees do not multiply to the world size.
    """
    here = init(device)
    world = dist.get_world_size()
    product = 1
    for degree in plan.degrees.values():
        product *= degree
    if product != world:
        raise PlanError(
            "degrees",
            dict(plan.degrees),
            f"they multiply to {product}, and must to the world size, {world}",
            f"run on {product} ranks, or plan for world_size={world}",
        )
    names = tuple(plan.degrees)
    return init_device_mesh(here.type, tuple(plan.degrees[n] for n in names), mesh_dim_names=names)


def group_over(mesh: DeviceMesh, axes: Sequence[str]) -> dist.ProcessGroup:
    """The process group of the ranks that differ from this one in their places on `axes` only.

    Args:
        axes: names of mesh axes, in mesh order. For more than one, the first call for a combination makes the group and
            must come on every rank of the mesh alike.
    """
    return mesh.get_group(axes[0]) if len(axes) == 1 else flattened_group(mesh, tuple(axes))


def first_ranks(size: int) -> dist.ProcessGroup | None:
    """Make ranks 0 to `size` - 1 the whole world for everything that follows (a collective call).

    Returns:
        The group of those ranks, which is the default one now; None on ranks that are left out, where nothing changes.
    """
    group = dist.new_group(list(range(size)))
    if dist.get_rank() >= size:
        return None
    set_default_group(group)
    return group


def make_default(group: dist.ProcessGroup) -> None:
    """Make `group` the whole world for everything that follows, on its ranks."""
    set_default_group(group)


def groups_now() -> frozenset[dist.ProcessGroup]:
    """The process groups that exist on this rank."""
    return frozenset(live_groups()) if dist.is_initialized() else frozenset()


def end_groups(groups: Iterable[dist.ProcessGroup]) -> None:
    """End process groups that nothing uses any more; those that are gone already, and the default one, are left alone."""
    alive = groups_now()
    for group in groups:
        if group in alive and group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    forget_meshes()


Placements = Sequence[Placement | State] | Mapping[str, Placement | State]
"""One per mesh axis, outermost first, or by the name of the axis."""


def meant(
    mesh: DeviceMesh | Placements | None, placements: Placements | None, known: DeviceMesh | None = None
) -> tuple[DeviceMesh, Sequence[Placement | State]]:
    """Mesh and placements of a call that may leave the mesh out and give the placements in its place.

    Args:
        mesh, placements: as they were given.
        known: the mesh that the tensor lies over already.

    Raises:
        UsageError: no placements, no mesh where it takes one, or no such axis.
    """
    if placements is None and mesh is not None and not isinstance(mesh, DeviceMesh):
        mesh, placements = None, mesh
    if placements is None or not (mesh is None or isinstance(mesh, DeviceMesh)):
        raise UsageError("no placements; give one per mesh axis: distribute(tensor, mesh, [Shard(0)])")
    over = mesh or known or _around(placements)
    return over, _by_axis(placements, over)


def _around(placements: Placements) -> DeviceMesh:
    """The mesh of the surrounding `with mesh:`; outside of one, all ranks as one axis, for one placement.

    Raises:
        UsageError: there is no mesh around, and more than one axis is meant.
    """
    entered = entered_mesh()
    if entered is not None:
        return entered
    if len(placements) != 1:
        raise UsageError(
            f"{len(placements)} placements and no mesh; call inside `with mesh:`, or give the mesh: "
            "distribute(tensor, mesh, placements)"
        )
    names = tuple(placements) if isinstance(placements, Mapping) else ("ranks",)
    return init_device_mesh(init().type, (dist.get_world_size(),), mesh_dim_names=names)


def _by_axis(placements: Placements, mesh: DeviceMesh) -> Sequence[Placement | State]:
    """One placement per axis of `mesh`; an axis that a mapping does not name holds the whole value on every rank.

    Raises:
        UsageError: the mesh has no axis of that name.
    """
    if not isinstance(placements, Mapping):
        return placements
    names = mesh.mesh_dim_names or ()
    for axis in placements:
        if axis not in names:
            known = ", ".join(names) or "none that have names"
            raise UsageError(
                f"placement of mesh axis {axis!r}; the axes of the mesh are {known}; use one of them"
            )
    return [placements.get(axis, "I") for axis in names]
