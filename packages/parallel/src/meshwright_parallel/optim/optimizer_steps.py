"""Steps of stock optimizers on sharded parameters: hooks, and steps on local tensors.

A step on DTensors has Python dispatch for each of a dozen small functions per parameter. Elementwise optimizers do not need
it. So the step runs on a copy of the optimizer whose parameters and states are the local tensors, for which torch has
multi-tensor kernels. The user's optimizer keeps its DTensor parameters and states, which share memory with the copy's.

Muon is stepped in `muon`: elementwise on local tensors, and on whole matrices where it needs them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, Muon, NAdam, RAdam, RMSprop, Rprop
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright_dtensor._torch.core import local_states
from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.mesh.context import follow_call
from meshwright_dtensor.parameter import MeshParameter, state_like
from meshwright_dtensor.stages.optimizers import show_states, states_changed, steps_each_parameter
from meshwright_dtensor.stages.stage_tensor import StageTensor, value_of
from meshwright_dtensor.stages.whole_model import WholeModel, whole_model_among
from meshwright_dtensor.stored.elementwise import parts_correspond
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.permuted import PermutedDTensor, like_parameter, permuted_layout
from meshwright_dtensor.tensor.compute_copy import touch
from meshwright_dtensor.utils.step_copy import step_copy
from meshwright_parallel._torch.core import local_of
from meshwright_parallel.optim.muon import MuonGroups
from meshwright_parallel.optim.quantized_states import blocks_of
from meshwright_parallel.optim.whole_blocks import BlockGroups, block_copy, refuse_stages_of_blocks
from meshwright_parallel.optim.whole_matrices import OwnedGroups, keep_changes, refuse_stages, whole_copy
from meshwright_parallel.ranks import check_options

ELEMENTWISE = frozenset({SGD, ASGD, NAdam, Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop, Rprop})
"""Exactly these classes: a subclass may need whole tensors."""
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States with one number per parameter."""
_STEPPED = "_meshwright_stepped"


@cache
def watch_optimizer_steps() -> None:
    """Hook the steps of all optimizers.

    Before a step, states loaded from one device are distributed over the mesh. Elementwise steps run on local tensors. The user
    makes the optimizer and loads its states, so hooks are the only place for this.
    """
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if isinstance(optimizer.param_groups, (OwnedGroups, BlockGroups)):
        # of a copy, whose step calls that of its base class
        return None
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(isinstance(p, (MeshParameter, StageTensor)) for p in parameters):
        return None
    follow_call(parameters[0], f"step of {type(optimizer).__name__}")
    check_options(optimizer)
    model = whole_model_among(parameters)
    if model is not None:
        refuse_stages(optimizer)
        refuse_stages_of_blocks(optimizer)
    # torch calls the step of what is given in its place
    may_replace = bool(args) and args[0] is optimizer
    with nullcontext() if model is None else model.entered():
        blocks = blocks_of(optimizer)
        # of local tensors alone, so that the hooks and the closure of the user may see all stages
        local_copy = None
        if may_replace and blocks is None:
            local_copy = local_optimizer(optimizer, as_left=True)
        if blocks is None and local_copy is None:
            _distribute_states(optimizer)
        if may_replace and local_copy is None:
            local_copy = local_optimizer(optimizer) if blocks is None else block_copy(optimizer, blocks)
    if local_copy is not None:
        return (local_copy, *args[1:]), kwargs
    if model is not None and not steps_each_parameter(optimizer):
        show_states(optimizer)
        return None
    return _with_all_stages(optimizer, model, args, kwargs, may_replace)


def _with_all_stages(
    optimizer: torch.optim.Optimizer, model: WholeModel | None, args: Any, kwargs: Any, may_replace: bool
) -> Any:
    """The arguments of a step that is not of local tensors alone: its closure sees all stages, matrices are stepped whole."""
    if model is not None:
        model.begin_step()
        args = (*args[:1], *(_outside(model, x) for x in args[1:]))
        kwargs = {key: _outside(model, value) for key, value in kwargs.items()}
    copied = (whole_copy(optimizer) or muon_optimizer(optimizer)) if may_replace else None
    return args if copied is None else (copied, *args[1:]), kwargs


def _outside(model: WholeModel, closure: Any) -> Any:
    """A closure in the arguments of a step that sees all stages; any other argument itself."""
    if not callable(closure):
        return closure

    def run() -> Any:
        model.end_step()
        try:
            return closure()
        finally:
            model.begin_step()

    return run


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if isinstance(optimizer.param_groups, (OwnedGroups, BlockGroups)):
        return
    model = whole_model_among([p for group in optimizer.param_groups for p in group["params"]])
    replaced = args and args[0] is not optimizer and type(args[0]) is type(optimizer)
    if model is not None:
        model.end_step()
        states_changed(optimizer, model)
    if replaced:
        # of this step alone: an optimizer that keeps the changes of its copy would keep local tensors and old states alive
        stepped = args[0].__dict__.pop(_STEPPED, None)
        keep_changes(optimizer, args[0])
        with nullcontext() if model is None else model.entered():
            if isinstance(args[0].param_groups, BlockGroups):
                args[0].param_groups.keep()
            elif stepped is not None:
                copy_states_back(optimizer, args[0], stepped)


def _distribute_states(optimizer: torch.optim.Optimizer) -> None:
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, MeshParameter) or not isinstance(entries, dict):
            continue
        distributed = _state_class(parameter)
        for key, value in entries.items():
            if isinstance(value, StageTensor):
                value = entries[key] = value_of(value)
            if type(value) is distributed or not isinstance(value, torch.Tensor) or key == "step":
                continue
            if key in NUMBERS and not value.dim() and not isinstance(value, DTensor):
                # also for a parameter that is one number itself
                continue
            same_shape = value.shape == parameter.shape
            # from a checkpoint: a stock DTensor, not permuted
            if isinstance(value, DTensor):
                in_order = permuted_layout(parameter) is not None and permuted_layout(value) is None
                permutes = in_order and same_shape
                entries[key] = like_parameter(value, parameter) if permutes else mesh_value(value)
            elif same_shape:
                entries[key] = mesh_value(like_parameter(value, parameter))


def _state_class(parameter: MeshParameter) -> type[DTensor]:
    """The class of the states that have the shape of the parameter."""
    return MeshValue if parameter._order is None else PermutedDTensor


def refuse_assigned_state(model: nn.Module) -> None:
    """Make `load_state_dict(assign=True)` raise: it would replace distributed parameters by plain ones."""
    for module in model.modules():
        module.register_load_state_dict_pre_hook(_refuse)


def _refuse(module: nn.Module, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise UnsupportedError(
            "load_state_dict(assign=True) would replace distributed parameters by plain ones, which the optimizer and the "
            "gradient reduction do not know; use assign=False: whole values are copied into each rank's part"
        )


@dataclass(slots=True)
class _Stepped:
    """A parameter in one step.

    Attributes:
        local: its local tensor, or itself where it is plain.
        entries, parts: its states in the user's optimizer and in the copy; None before its first step.
        before: the values of `parts` before the step, where they are the local tensors of those of `entries`; else ().
    """

    parameter: torch.Tensor
    local: torch.Tensor
    entries: dict[str, Any] | None = None
    parts: dict[str, Any] | None = None
    before: tuple[Any, ...] = ()


def local_optimizer(optimizer: torch.optim.Optimizer, as_left: bool = False) -> torch.optim.Optimizer | None:
    """A copy of the optimizer over local tensors, for one step; None where the step needs DTensors.

    Args:
        as_left: also None where a state is not as an earlier step has left it, such as one that was loaded.
    """
    if type(optimizer) not in ELEMENTWISE or optimizer.defaults.get("differentiable"):
        return None
    groups: list[dict[str, Any]] = []
    states: dict[Any, dict[str, Any]] = {}
    stepped: list[_Stepped] = []
    local_copy = step_copy(optimizer, type(optimizer.state)(dict, states))  # type: ignore[call-arg]
    for group in optimizer.param_groups:
        locals_ = []
        for parameter in _here(group):
            mine = isinstance(parameter, MeshParameter)
            if not mine and isinstance(parameter, DTensor):
                return None
            local = local_of(parameter) if mine else parameter
            locals_.append(local)
            entries = optimizer.state.get(parameter)
            if entries is None:
                stepped.append(_Stepped(parameter, local))
                continue
            parts = None
            if isinstance(parameter, MeshParameter):
                parts = local_states(entries, parameter, _state_class(parameter), NUMBERS)
            before = () if parts is None else tuple(parts.values())
            if parts is None and not (mine and as_left):
                parts = _local_entries(parameter, entries)
            if parts is None:
                return None
            states[local] = parts
            stepped.append(_Stepped(parameter, local, entries, parts, before))
        groups.append({**group, "params": locals_})
    local_copy.state.update(states)
    local_copy.param_groups = groups
    local_copy.__dict__[_STEPPED] = stepped
    return local_copy


def _here(group: Mapping[str, Any]) -> list[torch.Tensor]:
    """The parameters of a group without those of other stages."""
    return [p for p in group["params"] if not isinstance(p, StageTensor)]


def _local_entries(parameter: Any, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    local_entries = {}
    for key, value in entries.items():
        if isinstance(value, DTensor):
            if not isinstance(parameter, MeshParameter) or not parts_correspond(parameter, value):
                # stock DTensor redistributes it, or raises
                return None
            value = local_of(value)
        local_entries[key] = value
    return local_entries


def copy_states_back(
    optimizer: torch.optim.Optimizer, local_copy: torch.optim.Optimizer, parameters: list[_Stepped]
) -> None:
    """Put the states of the local copy into the user's optimizer after a step."""
    for stepped in parameters:
        parameter, local, parts = stepped.parameter, stepped.local, stepped.parts
        if isinstance(parameter, MeshParameter) and parameter._copy is not None and local.grad is not None:
            # fused kernels do not increase version counters
            touch(parameter)
        if parts is None:
            if local not in local_copy.state:
                continue
            parts = local_copy.state[local]
        elif len(parts) == len(stepped.before) and all(map(is_, parts.values(), stepped.before)):
            # written in place
            continue
        entries = optimizer.state[parameter] if stepped.entries is None else stepped.entries
        if not isinstance(parameter, MeshParameter):
            entries.update(parts)
            continue
        for key, value in parts.items():
            old = entries.get(key)
            if isinstance(old, DTensor) and local_of(old) is value:
                continue
            shaped = isinstance(value, torch.Tensor) and value.shape == local.shape
            entries[key] = state_like(parameter, value) if shaped and key not in NUMBERS else value


def muon_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy of a Muon with the same states, for one step, whose matrices are each computed on one rank; None for other classes."""
    if type(optimizer) is not Muon:
        return None
    copied = step_copy(optimizer, optimizer.state)
    copied.param_groups = MuonGroups(optimizer)  # type: ignore[assignment]
    return copied
