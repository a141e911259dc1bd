"""The mesh that is meant where a call names none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Placement

from meshwright_dtensor._torch import entered_mesh
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh import init
from meshwright_dtensor.states import State

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
