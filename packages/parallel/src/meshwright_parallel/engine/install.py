"""Give the parameters of a placed model their compute copies: unsharded along the ZeRO axis, cast, or both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.mesh.layout import layout_of
from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Strategy
from meshwright_parallel.engine.flat_shards import Shards
from meshwright_parallel.engine.param_group import UnshardedParameter
from meshwright_parallel.engine.unshard import GroupSpec, ModuleGroups, UnshardEngine, hook_module


def install_compute_copies(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> None:
    """Install the unsharded parameters that `plan` asks for."""
    axis = next((s.axis for s in strategies if s.gathers and plan.degree(s.axis) > 1), "")
    dtype = None if plan.precision is None else DTYPES[plan.precision.parameters]
    stage = plan.zero.stage if plan.zero is not None and axis else 0
    specs: dict[tuple[object, ...], GroupSpec] = {}
    modules: dict[str, nn.Module] = {}
    for name, module, parameters in parameter_units(model):
        modules[name] = module
        for _, parameter in parameters:
            assert isinstance(parameter, MeshParameter)
            unsharded = _unsharded(parameter, axis, dtype)
            if unsharded is not None:
                key = (name, unsharded.layout.dtype, parameter.dtype, parameter.device)
                spec = specs.setdefault(key, GroupSpec(name, module is model, []))
                spec.parameters.append(unsharded)
    if not specs:
        return
    engine = UnshardEngine(mesh, list(specs.values()), reshards=stage == 3)
    for name, module in modules.items():
        indices = tuple(group.index for group in engine.groups if group.name == name)
        if indices or module is model:
            hook_module(module, ModuleGroups(engine, indices, module is model))


def _unsharded(parameter: MeshParameter, axis: str, dtype: torch.dtype | None) -> UnshardedParameter | None:
    """The compute copy of a parameter; None where it is computed with as it is stored."""
    stored = parameter.compute_layout
    states: list[State] = list(stored.states)
    shard_dim = states[stored.context.axes.index(axis)] if axis else "I"
    compute_dtype = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    if not isinstance(shard_dim, int):
        if compute_dtype == stored.dtype:
            return None
        layout = layout_of(stored.context, stored.states, stored.shape, compute_dtype)
        return UnshardedParameter(parameter, layout, "", None)
    mesh_dim = stored.context.axes.index(axis)
    states[mesh_dim] = "X"
    layout = layout_of(stored.context, tuple(states), stored.shape, compute_dtype)
    # from the strides of the global value: ranks must agree, and their shards may differ in length
    stride = parameter.stride()
    order = tuple(sorted(range(parameter.dim()), key=lambda d: (-stride[d], stored.shape[d] == 1)))
    shards = Shards(
        shape=tuple(layout.local_shape),
        dim=int(shard_dim),
        count=stored.context.sizes[mesh_dim],
        rank=stored.context.coords[mesh_dim],
        order=order,
    )
    return UnshardedParameter(parameter, layout, axis, shards)
