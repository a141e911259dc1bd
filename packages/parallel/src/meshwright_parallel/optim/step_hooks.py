"""Hooks of stock optimizers and of `load_state_dict`, so that states get the placements of their parameters."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from meshwright_dtensor.errors import UnsupportedError
from meshwright_dtensor.parameter import MeshParameter
from meshwright_dtensor.stored.mesh_value import MeshValue, mesh_value
from meshwright_dtensor.stored.permuted import PermutedDTensor, like_parameter, permuted_layout
from meshwright_parallel.optim.local_step import ELEMENTWISE, NUMBERS, copy_states_back, local_optimizer
from meshwright_parallel.optim.whole_step import whole_optimizer


@cache
def watch_optimizer_steps() -> None:
    """Hook the steps of all optimizers.

    Before a step, states loaded from one device are distributed over the mesh. Elementwise steps run on local tensors, steps of
    whole matrices on whole tensors. The user makes the optimizer and loads its states, so hooks are the only place for this.
    """
    register_optimizer_step_pre_hook(_before)
    register_optimizer_step_post_hook(_after)


def _before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
    if not any(isinstance(p, MeshParameter) for group in optimizer.param_groups for p in group["params"]):
        return None
    _distribute_states(optimizer)
    if not args or args[0] is not optimizer:
        return None
    replacement = local_optimizer(optimizer) or whole_optimizer(optimizer)
    return None if replacement is None else ((replacement, *args[1:]), kwargs)


def _after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if (
        args
        and args[0] is not optimizer
        and type(args[0]) is type(optimizer)
        and type(optimizer) in ELEMENTWISE
    ):
        copy_states_back(optimizer, args[0])


def _distribute_states(optimizer: torch.optim.Optimizer) -> None:
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, MeshParameter) or not isinstance(entries, dict):
            continue
        distributed = MeshValue if permuted_layout(parameter) is None else PermutedDTensor
        for key, value in entries.items():
            if type(value) is distributed:
                continue
            if not isinstance(value, torch.Tensor) or key == "step":
                continue
            if key in NUMBERS and not value.dim() and not isinstance(value, DTensor):
                # also for a parameter that is one number itself
                continue
            same_shape = value.shape == parameter.shape
            # from a checkpoint: a stock DTensor, not permuted
            if isinstance(value, DTensor):
                in_order = permuted_layout(parameter) is not None and permuted_layout(value) is None
                entries[key] = (
                    like_parameter(value, parameter) if in_order and same_shape else mesh_value(value)
                )
            elif same_shape:
                entries[key] = mesh_value(like_parameter(value, parameter))


def refuse_assigned_state(model: nn.Module) -> None:
    """Make `load_state_dict(assign=True)` raise: it would replace distributed parameters by plain ones."""
    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):
            module.register_load_state_dict_pre_hook(_refuse)


def _refuse(
    module: nn.Module, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
) -> None:
    if local_metadata.get("assign_to_params_buffers"):
        raise UnsupportedError(
            "load_state_dict(assign=True) would replace distributed parameters by plain ones, which the optimizer and the "
            "gradient reduction do not know; use assign=False: whole values are copied into each rank's part"
        )
