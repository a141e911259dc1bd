"""The state dict of one device: plain, whole tensors of a model that is divided over ranks and stages."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_checkpoint._torch import plain_name, unwrapped
from meshwright_checkpoint.state.collect import check_model
from meshwright_dtensor.devices import HOST
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.stages.stage_tensor import StageValue
from meshwright_dtensor.stages.whole_model import whole_models_in


def full_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Any]:
    """The state dict that `model` would have on one device: plain CPU tensors under the names of one device.

    All ranks call it (a collective call). Tensors are gathered one by one, so a rank needs memory for one tensor more than
    it keeps. Tied tensors are one tensor under several names.

    Args:
        model: parallel or not.
        everywhere: every rank gets the values; otherwise rank 0 does, and the others get an empty dict.

    Raises UsageError: `model` is not a module, or shows the parameters of this rank's stages only.
    """
    check_model("full_state_dict", model)
    inner = unwrapped(model)
    stages = whole_models_in(inner)
    if any(stage.inside for stage in stages) or (stages_of(inner) is not None and not stages):
        raise UsageError(
            "full_state_dict(model) of a model that shows the parameters of this rank's stages only; call it between steps, not in "
            "a hook, and divide the model by parallelize()"
        )
    keeps = everywhere or not dist.is_initialized() or dist.get_rank() == 0
    values: dict[str, Any] = {}
    by_object: dict[Any, torch.Tensor] = {}
    objects = inner.state_dict(keep_vars=True)
    # as values that are read: parameters with another order of elements have that of one device
    for name, value in inner.state_dict().items():
        if isinstance(value, torch.Tensor):
            # whether two names of a buffer are one tensor is known where it is held only
            shared = isinstance(objects[name], nn.Parameter) or not isinstance(value, StageValue)
            key = id(objects[name]) if shared else name
            if key not in by_object:
                whole = value.full_tensor() if hasattr(value, "full_tensor") else value
                # the others need no memory for it
                by_object[key] = whole.detach().to(HOST, copy=True) if keeps else torch.empty(0, device=HOST)
            value = by_object[key]
        values[plain_name(name)] = value
    # extra states of modules
    others = [{name: value for name, value in values.items() if not isinstance(value, torch.Tensor)}]
    if everywhere and stages and others[0]:
        dist.broadcast_object_list(others)
        values |= others[0]
    return values if keeps else {}
