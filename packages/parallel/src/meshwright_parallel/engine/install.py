"""Give the parameters of a placed model their compute copies: gathered over the axis that shares them, cast, or both."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.model.blocks import parameter_units
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy.strategy import Strategy
from meshwright_parallel.engine.flat_shards import Shards
from meshwright_parallel.engine.param_group import Copy
from meshwright_parallel.engine.unshard import Gathering, Group, UnitHook, hook_module


def install_copies(
    model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan, strategies: Sequence[Strategy]
) -> None:
    """Install the compute copies that `plan` asks for."""
    axis = next((s.axis for s in strategies if s.gathers and plan.degree(s.axis) > 1), "")
    dtype = None if plan.precision is None else DTYPES[plan.precision.parameters]
    stage = plan.zero.stage if plan.zero is not None and axis else 0
    groups: dict[tuple[object, ...], Group] = {}
    modules: dict[str, nn.Module] = {}
    for name, module, parameters in parameter_units(model):
        modules[name] = module
        for _, parameter in parameters:
            assert isinstance(parameter, MeshParameter)
            copy = _copy(parameter, axis, dtype)
            if copy is not None:
                key = (name, copy.layout.dtype, parameter.dtype, parameter.device)
                group = groups.setdefault(key, Group(name, module is model, []))
                group.copies.append(copy)
    if not groups:
        return
    engine = Gathering(mesh, list(groups.values()), frees=stage == 3)
    for name, module in modules.items():
        indices = tuple(unit.index for unit in engine.units if unit.name == name)
        if indices or module is model:
            hook_module(module, UnitHook(engine, indices, module is model))


def _copy(parameter: MeshParameter, axis: str, dtype: torch.dtype | None) -> Copy | None:
    stored = parameter.compute_layout
    states: list[State] = list(stored.states)
    cut = states[stored.context.axes.index(axis)] if axis else "I"
    cast_to = dtype if dtype is not None and stored.dtype.is_floating_point else stored.dtype
    if not isinstance(cut, int) and cast_to == stored.dtype:
        return None
    if not isinstance(cut, int):
        return Copy(parameter, stored.context.layout(stored.states, stored.shape, cast_to), "", None)
    place = stored.context.axes.index(axis)
    states[place] = "X"
    layout = stored.context.layout(tuple(states), stored.shape, cast_to)
    stride = parameter.stride()
    # of the global value: ranks must agree on it, whatever the lengths of their shards
    order = tuple(sorted(range(parameter.dim()), key=lambda d: (-stride[d], stored.shape[d] == 1)))
    shape, count, rank = tuple(layout.local_shape), stored.context.sizes[place], stored.context.coords[place]
    return Copy(parameter, layout, axis, Shards(shape, int(cut), count, rank, order))
