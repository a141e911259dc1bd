"""Makes global tensors and mesh parameters: ``distribute``, ``from_local``, ``as_mesh_parameter``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from meshwright_dtensor._torch.core import entered_mesh
from meshwright_dtensor._torch.groups import new_mesh
from meshwright_dtensor.comm.collectives import refuse_tangent
from meshwright_dtensor.comm.redistribute import convert
from meshwright_dtensor.dispatch.install import install
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import layout_of, replicated_layout, states_of
from meshwright_dtensor.mesh.mesh import init
from meshwright_dtensor.parameter import MeshParameter, new_mesh_parameter
from meshwright_dtensor.sharding.states import State, States
from meshwright_dtensor.tensor.global_tensor import GlobalTensor, check_shardable, wrap

Tensor = torch.Tensor
Placements = Sequence[Placement | State] | Mapping[str, Placement | State]
"""One per mesh axis, outermost first, or by the name of the axis."""


def distribute(
    tensor: Tensor, mesh: DeviceMesh | Placements | None = None, placements: Placements | None = None
) -> GlobalTensor:
    """Distribute a global value: ``distribute(x, mesh, [Shard(0)])``, ``distribute(x, {"tp": Shard(0)})``.

    Args:
        tensor: the global value, the same on every rank.
        mesh: the device mesh. It may be left out, the placements then come second: it is that of the surrounding
            ``with mesh:``, or, for a single placement, all ranks as one axis.
        placements: torch placements (Replicate, Shard, Partial) or states, one per mesh axis, outermost first, or a
            mapping from axis names; the value is replicated on axes that are not in it.

    Returns:
        The global tensor; a leaf of autograd requires grad if ``tensor`` does and stays connected to it.

    Raises:
        UsageError: no placements, no mesh where it takes one, or no such axis.
        UnsupportedError: a dim that is too short to be sharded, or is not there; a forward-mode derivative of ``tensor``.
    """
    current = tensor.global_layout.context.mesh if isinstance(tensor, GlobalTensor) else None
    mesh, placements = resolve_mesh(mesh, placements, current)
    if isinstance(tensor, GlobalTensor):
        return tensor.redistribute(placements)
    # it would be that of this rank's operations, without those of other ranks
    refuse_tangent(tensor)
    context = MeshContext.of(mesh)
    states = states_of(placements, tensor.shape, context)
    check_shardable(context, tensor.shape, states)
    source = replicated_layout(context, tensor)
    target = source.with_states(states)
    install()
    if target is source:
        return wrap(tensor.view_as(tensor) if tensor.requires_grad else tensor.detach(), target)
    return wrap(convert(tensor, source, target.states), target)


def from_local(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement | State], shape: Sequence[int]
) -> GlobalTensor:
    """The global tensor of global ``shape`` whose part here is ``local``. Raises UnsupportedError if that has another shape."""
    context = MeshContext.of(mesh)
    states = states_of(placements, shape, context)
    check_shardable(context, shape, states)
    layout = layout_of(context, states, tuple(shape), local.dtype)
    if tuple(local.shape) != tuple(layout.local_shape):
        raise UnsupportedError(
            f"local tensor of shape {list(local.shape)} is not this rank's part of {layout!r}, "
            f"which has shape {list(layout.local_shape)}"
        )
    install()
    return wrap(local, layout)


def as_mesh_parameter(dtensor: DTensor, states: States, requires_grad: bool = True) -> MeshParameter:
    """An ``nn.Parameter`` over ``dtensor`` that takes part in global tensor computations.

    Args:
        dtensor: a leaf over the full mesh whose placements are those of ``states``; its memory is taken over.
        states: one state per mesh axis: ``I``, ``X`` (its gradient is reduced later by an engine) or a shard dim.

    Raises UnsupportedError: the states contradict the placements.
    """
    install()
    return new_mesh_parameter(dtensor, states, requires_grad)


def resolve_mesh(
    mesh: DeviceMesh | Placements | None, placements: Placements | None, current: DeviceMesh | None = None
) -> tuple[DeviceMesh, Sequence[Placement | State]]:
    """Mesh and placements of a call, in which the mesh may be left out and the placements come second.

    ``current``: the mesh of the tensor, if it has one. Raises UsageError for no placements, no mesh where it takes one, or
    no such axis.
    """
    if placements is None and mesh is not None and not isinstance(mesh, DeviceMesh):
        mesh, placements = None, mesh
    if placements is None or not (mesh is None or isinstance(mesh, DeviceMesh)):
        raise UsageError("no placements; give one per mesh axis: distribute(tensor, mesh, [Shard(0)])")
    chosen = mesh or current or _default_mesh(placements)
    if not isinstance(placements, Mapping):
        return chosen, placements
    names = chosen.mesh_dim_names or ()
    for axis in placements:
        if axis not in names:
            listed = ", ".join(names) or "none that have names"
            raise UsageError(
                f"placement of mesh axis {axis!r}; the axes of the mesh are {listed}; use one of them"
            )
    # on an axis that a mapping does not name, every rank holds the whole value
    return chosen, [placements.get(axis, "I") for axis in names]


def _default_mesh(placements: Placements) -> DeviceMesh:
    """The mesh of the surrounding `with mesh:`; outside of one, for one placement, all ranks as one axis."""
    entered = entered_mesh()
    if entered is not None:
        return entered
    if len(placements) != 1:
        raise UsageError(
            f"{len(placements)} placements and no mesh; call inside `with mesh:`, or give the mesh: "
            "distribute(tensor, mesh, placements)"
        )
    names = tuple(placements) if isinstance(placements, Mapping) else ("ranks",)
    return new_mesh(init().type, [dist.get_world_size()], names)
