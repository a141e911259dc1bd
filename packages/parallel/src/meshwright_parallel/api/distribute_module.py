"""`distribute_module`: the signature of torch, for an existing mesh, with a plan made for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy.plan_request import DEGREES, KEYWORDS
from meshwright_parallel.api.auto_parallelize import auto_parallelize
from meshwright_parallel.ranks import same_plugins

PartitionFn = Callable[[str, nn.Module, DeviceMesh], None]


def distribute_module(
    module: nn.Module, mesh: DeviceMesh, partition_fn: PartitionFn | str = "AUTO", *, batch: Any
) -> nn.Module:
    """Plan for the axes of a mesh and distribute a module over them, in place, as torch's distribute_module does by hand.

    Args:
        module: any module.
        mesh: a mesh of all ranks, whose axes have the names of installed strategies (dp, zero, cp, ep, tp, ...): its sizes
            are the degrees of the plan.
        partition_fn: "AUTO" plans everything. A function, called as torch calls it for every submodule with (name,
            submodule, mesh), marks parameters with `mark_sharding`; the rest is planned around its marks.
        batch: an example of the GLOBAL batch, the same on every rank, as for `auto_parallelize`.

    Returns:
        `module`; `module.parallel_plan` holds the plan.

    Raises:
        UsageError: the mesh has no names, names that no strategy owns, or not all ranks; the function made DTensors.
        InfeasibleError, PlanError: as `auto_parallelize`.
    """
    if not isinstance(mesh, DeviceMesh):
        raise UsageError(f"mesh is a {type(mesh).__name__}; give a torch DeviceMesh with mesh_dim_names")
    names = mesh.mesh_dim_names
    if names is None:
        raise UsageError(
            f"a mesh of {list(mesh.shape)} has no names for its axes; give them: "
            'init_device_mesh(..., mesh_dim_names=("dp", "tp"))'
        )
    if mesh.size() != dist.get_world_size():
        raise UsageError(
            f"a mesh of {mesh.size()} ranks in a job of {dist.get_world_size()}; give the mesh of all ranks, whose axes "
            "are the degrees of the plan"
        )
    sizes = dict(zip(names, mesh.shape, strict=True))
    if callable(partition_fn):
        for name, submodule in module.named_modules():
            partition_fn(name, submodule, mesh)
        distributed = [name for name, p in module.named_parameters() if isinstance(p, DTensor)]
        if distributed:
            raise UsageError(
                f"partition_fn made a DTensor of {distributed[0]!r}, but the plan distributes parameters; "
                "use mark_sharding(parameter, {axis: Shard(dim)}) there"
            )
    elif partition_fn != "AUTO":
        raise UsageError(f'partition_fn={partition_fn!r} is neither "AUTO" nor a function; give one of them')
    return auto_parallelize(module, batch, **_pins(sizes))


def _pins(sizes: dict[str, int]) -> dict[str, Any]:
    """The keywords of `auto_parallelize` that pin the sizes of the mesh; missing axes have degree 1."""
    installed = {registered.record.axis for registered in same_plugins(None).strategies().values()}
    unknown = [axis for axis in sizes if axis not in installed]
    if unknown:
        raise UsageError(
            f"mesh axis {unknown[0]!r}: no installed strategy owns it (installed axes: {', '.join(sorted(installed))}); "
            "name each axis after its strategy"
        )
    shards = sizes.get("zero", 1)
    pins: dict[str, Any] = {axis: sizes.get(axis, 1) for axis in DEGREES if axis in installed - {"zero"}}
    pins["dp"] = sizes.get("dp", 1) * shards
    if shards > 1:
        pins["zero_degree"] = shards
    pins["degrees"] = {axis: sizes.get(axis, 1) for axis in installed if axis not in KEYWORDS}
    return pins
