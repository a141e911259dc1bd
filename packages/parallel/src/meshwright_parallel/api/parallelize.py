"""Apply a plan to a model in place: the class and calls of the model stay the same, its values are distributed over a mesh.

    model = parallelize(model, plan)
    optimizer = torch.optim.AdamW(model.parameters())      # stock, over DTensor parameters
    loss = model(**batch).loss                             # plain tensors are global values
    loss.backward()

Every parameter becomes a DTensor of which this rank holds its part; make optimizers afterwards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.modes import without_inference_mode
from meshwright_dtensor.api import as_mesh_parameter
from meshwright_dtensor.deferred.materialize import local_values
from meshwright_dtensor.dispatch.module_to import install_module_to
from meshwright_dtensor.dispatch.planned_calls import install_targets
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.mesh.layout import stored_placement
from meshwright_dtensor.mesh.mesh import build_mesh, init, live_process_groups
from meshwright_dtensor.model.compiled import Uncompiled, refuse_compiling
from meshwright_dtensor.model.precision import DTYPES, cast_buffers, computes_as_stored
from meshwright_dtensor.model.wrapped import refuse_wrapping
from meshwright_dtensor.plan import CompileRule, ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.sharding.boxes import dense_strides, dim_order_of, region_of, region_shape, whole_box
from meshwright_dtensor.sharding.states import States
from meshwright_dtensor.stages.whole_model import show_all_stages
from meshwright_dtensor.stored.permuted import install_true_order
from meshwright_dtensor.tensor.replaced import replace_tensor
from meshwright_dtensor.trace.one_device import show_one_device
from meshwright_dtensor.utils.process import return_freed_memory
from meshwright_parallel.compile.install import install_regions
from meshwright_parallel.engine.buckets import BucketSizes
from meshwright_parallel.engine.grad_reduction import install_reduction, make_groups
from meshwright_parallel.engine.unshard import install_compute_copies
from meshwright_parallel.moe.local_tokens import install_local_tokens, local_token_modules
from meshwright_parallel.optim.optimizer_steps import refuse_assigned_state, watch_optimizer_steps
from meshwright_parallel.placement.fixed_embeddings import refuse_resizing
from meshwright_parallel.placement.inputs import LIVE, ModelPlacement, install_inputs
from meshwright_parallel.placement.nested_padding import install_padding
from meshwright_parallel.placement.stage_plan import link_stages
from meshwright_parallel.placement.unparallelize import PlanUndo, has_no_values
from meshwright_parallel.ranks import check_ranks_agree, install_batch_check, install_call_order, same_plugins
from meshwright_parallel.recompute.checkpoint import install_recompute
from meshwright_parallel.strategies.data import BUCKET_BYTES
from meshwright_parallel.validation.checks import check_fit, check_model, check_optimizers


@without_inference_mode()
def parallelize(
    model: nn.Module, plan: ParallelPlan, *, batch: Any = None, plugins: PluginHost | None = None
) -> nn.Module:
    """Distribute `model` over the ranks by `plan`, in place.

    Args:
        model: an ordinary module, the same on every rank, or built inside `deferred_init()`. Its parameters are replaced:
            make optimizers afterwards, from `model.parameters()`. What `torch.compile` was called with is compiled as a region
            (`compile=True`), and the module inside of it is returned.
        plan: from a planner, a file or by hand. `model.parallel_plan` holds it afterwards.
        batch: an example of the model's arguments (a dict of keywords, a tuple of arguments or a tensor). It is checked
            against the plan, and not run.
        plugins: where strategies are looked up; by default the installed ones.

    Returns:
        `model`. Calls take plain tensors (global values: the same on every rank) or global tensors, and return global
        tensors. Its state dict holds DTensors, whose `full_tensor()` is the value of one device.

    Raises:
        PlanError: the plan does not fit the run, the model or the batch.
        UsageError: the model is parallel already, an optimizer holds its parameters, or ranks have different values or
            plans.
        PluginError: a strategy of the plan is not installed.
    """
    device = init()
    taken = Uncompiled(model)
    if taken.patterns and not plan.compile:
        plan = plan.replace(compile=tuple(CompileRule(pattern=pattern) for pattern in taken.patterns))
    try:
        return _applied(taken.model, plan, batch, same_plugins(plugins), device)
    except BaseException:
        taken.restore()
        raise


def _applied(
    model: nn.Module, plan: ParallelPlan, batch: Any, host: PluginHost, device: torch.device
) -> nn.Module:
    """`parallelize`, of a model without torch.compile."""
    world_size = dist.get_world_size()
    check_model(model)
    fit = check_fit(model, plan, batch, host, world_size)
    whole, part, states = fit.whole, fit.part, fit.states
    outer, inner, strategies = part.outer, part.plan, part.strategies
    check_optimizers(model)
    local_tokens = local_token_modules(model, inner, strategies)
    blank = has_no_values(model)
    if world_size > 1:
        check_ranks_agree(model, plan, device, values=not blank)
    undo = PlanUndo(model, live_process_groups())
    # before the embeddings may move to another stage, and before a pipeline copies the model
    refuse_resizing(model)
    install_padding(model, 1 if whole.pipeline is None else whole.pipeline.microbatches)
    all_axes = build_mesh(whole)
    mesh = all_axes if outer is None else all_axes[inner.axes]
    MeshContext.of(mesh).rng = inner.rng
    make_groups(mesh, states.values(), [strategy.axis for strategy in strategies if strategy.gathers])
    division = None if outer is None else outer.divide(model, whole, all_axes)
    plain = division is not None and mesh.size() == 1 and computes_as_stored(inner)
    placed = ModelPlacement(inner, mesh, strategies, plain)
    undo.replace(_place_parameters(model, mesh, states, device, blank))
    _place_buffers(model, device, inner)
    link_stages(model, mesh)
    install_true_order(model)
    install_recompute(model, inner, device)
    install_targets(model, inner)
    install_module_to(model)
    install_inputs(model, placed)
    refuse_assigned_state(model)
    watch_optimizer_steps()
    for strategy in strategies:
        strategy.attach(model, mesh, inner)
    install_local_tokens(model, local_tokens)
    install_regions(model, inner)
    install_compute_copies(model, mesh, inner, strategies)
    # a pipeline keeps gradients in other memory until the end of the step
    install_reduction(model, mesh, BucketSizes(BUCKET_BYTES, reuse=division is None))
    if division is None:
        install_batch_check(model, mesh, device)
        install_call_order(model, mesh)
    else:
        division.install(model, mesh, device, plain)
    model.parallel_plan = plan  # type: ignore[assignment]
    show_one_device(model, strategies)
    refuse_compiling(model)
    refuse_wrapping(model)
    _refuse_pickling(model)
    undo.finish(model)
    LIVE.add(placed)
    show_all_stages(model)
    # of whole parameters, and of planning, which may have run the model
    return_freed_memory()
    return model


def _place_parameters(
    model: nn.Module, mesh: DeviceMesh, states: Mapping[str, States], device: torch.device, blank: bool
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Replace every parameter by a mesh parameter; tied parameters stay tied. Returns the old and the new ones."""
    # by id; the old parameter is kept, so that its id is not reused
    new: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for prefix, module in model.named_modules():
        for name, old in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(old) not in new:
                fqn = f"{prefix}.{name}" if prefix else name
                new[id(old)] = (old, _mesh_parameter(old, mesh, states[fqn], device, blank))
            # not register_parameter: recurrent layers watch assignments
            setattr(module, name, new[id(old)][1])
    for old, placed in new.values():
        replace_tensor(old, placed)
    return list(new.values())


def _mesh_parameter(
    old: nn.Parameter, mesh: DeviceMesh, states: States, device: torch.device, blank: bool
) -> nn.Parameter:
    placed = _sharded(old, mesh, states, device, blank)
    parameter = as_mesh_parameter(placed, states, old.requires_grad)
    # users' attributes; torch's own names are private
    for name, value in vars(old).items():
        if not name.startswith("_"):
            setattr(parameter, name, value)
    if old.grad is not None:
        parameter.grad = _sharded(old.grad, mesh, states, device)
    return cast(nn.Parameter, parameter)


def _sharded(
    full: torch.Tensor, mesh: DeviceMesh, states: States, device: torch.device, blank: bool = False
) -> DTensor:
    """The DTensor of a value that every rank has whole; only this rank's part is copied.

    `blank`: there is no value yet, and the local tensor has no memory.
    """
    coordinates = [mesh.get_local_rank(axis) for axis in range(mesh.ndim)]
    region = region_of(tuple(full.shape), tuple(mesh.shape), coordinates, states)
    if blank:
        shape = region_shape(region)
        strides = dense_strides(shape, dim_order_of(full))
        local = torch.empty_strided(shape, strides, dtype=full.dtype, device=device)
        local.untyped_storage().resize_(0)
    else:
        local = local_values(full.detach(), region).to(device)
    placed = [stored_placement(state) for state in states]
    return DTensor.from_local(local, mesh, placed, run_check=False, shape=full.shape, stride=full.stride())


def _place_buffers(model: nn.Module, device: torch.device, plan: ParallelPlan) -> None:
    """Buffers stay plain and whole on every rank, in ordinary memory of the mesh's device, in the plan's precision."""
    dtype = torch.float32 if plan.precision is None else DTYPES[plan.precision.parameters]
    cast = cast_buffers(model) if dtype != torch.float32 else set()
    new: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    for module in model.modules():
        for name, old in list(module.named_buffers(recurse=False, remove_duplicate=False)):
            if id(old) not in new:
                value = local_values(old, whole_box(tuple(old.shape))).to(device)
                new[id(old)] = (old, value.to(dtype) if id(old) in cast else value)
            setattr(module, name, new[id(old)][1])
    for old, placed in new.values():
        replace_tensor(old, placed)


class _PicklingRefusal:
    """An attribute that cannot be pickled, of a model that can be copied."""

    def __reduce__(self) -> NoReturn:
        raise UnsupportedError(
            "a parallel model cannot be pickled or torch.saved: it has one rank's part of the values, hooks and process groups. "
            "Save mw.full_state_dict(model), whose values are plain and whole; or mw.save(path, model=model, optimizer=optimizer), "
            "which any layout loads; or mw.export(path, model=model) for from_pretrained"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> _PicklingRefusal:
        return self


def _refuse_pickling(model: nn.Module) -> None:
    """Make pickling `model` raise UnsupportedError, with the ways to save it."""
    attributes = dict(model.__dict__)
    model.__dict__.clear()
    # first, since pickle would name the first hook that it cannot pickle
    model.__dict__.update({"_meshwright_pickling": _PicklingRefusal(), **attributes})
