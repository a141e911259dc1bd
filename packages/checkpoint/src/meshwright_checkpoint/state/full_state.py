"""The state dict of one device: plain, whole tensors of a model that is divided over ranks and stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright_checkpoint._torch import full_value, plain_name, unwrapped
from meshwright_checkpoint.state.collect import check_model
from meshwright_dtensor.model.stage_info import stages_of
from meshwright_dtensor.stages.whole_model import own_stages


def full_state_dict(model: nn.Module, *, everywhere: bool = False) -> dict[str, Any]:
    """The state dict that `model` would have on one device: plain CPU tensors under the names of one device.

    All ranks call it (a collective call). Tensors are gathered one by one, so a rank needs memory for one tensor more than
    it keeps. Tied tensors are one tensor under several names.

    Args:
        model: parallel or not.
        everywhere: every rank gets the values; otherwise rank 0 does, and the others get an empty dict.

    Raises UsageError: `model` is not a module.
    """
    check_model("full_state_dict", model)
    inner = unwrapped(model)
    with own_stages(inner):
        return _full_state(inner, everywhere)


def _full_state(inner: nn.Module, everywhere: bool) -> dict[str, Any]:
    # as values that are read: parameters with another order of elements have that of one device
    held = {plain_name(name): value for name, value in inner.state_dict().items()}
    objects = {plain_name(name): id(value) for name, value in inner.state_dict(keep_vars=True).items()}
    keeps = everywhere or not dist.is_initialized() or dist.get_rank() == 0
    if stages_of(inner) is None:
        values = _gathered(held, objects, keeps)
        return values if keeps else {}
    return _over_stages(inner, held, objects, everywhere, keeps)


def _gathered(held: Mapping[str, Any], objects: Mapping[str, int], keeps: bool) -> dict[str, Any]:
    """The whole values of this rank's state dict; where it does not keep them, it only takes part."""
    values: dict[str, Any] = {}
    by_object: dict[int, torch.Tensor] = {}
    for name, value in held.items():
        if not isinstance(value, torch.Tensor):
            values[name] = value
            continue
        whole = by_object.get(objects[name])
        if whole is None:
            whole = full_value(value)
            # the others need no memory for it
            whole = by_object[objects[name]] = whole.to("cpu", copy=True) if keeps else torch.empty(0)
        values[name] = whole
    return values


def _over_stages(
    model: nn.Module, held: Mapping[str, Any], objects: Mapping[str, int], everywhere: bool, keeps: bool
) -> dict[str, Any]:
    """The whole values of all stages; a value that several stages hold comes from the first of them."""
    stages = stages_of(model)
    assert stages is not None
    rank = dist.get_rank()
    device = next((v.device for v in held.values() if isinstance(v, torch.Tensor)), None)

    def passed_on(whole: torch.Tensor | None, source: int, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        """A value of rank `source` on rank 0, or on every rank; empty where it is not kept."""
        buffer = whole if whole is not None else torch.empty(shape, dtype=dtype, device=device)
        if everywhere:
            dist.broadcast(buffer, src=source)
        elif source != 0:
            if rank == source:
                dist.send(buffer, dst=0)
            elif rank == 0:
                dist.recv(buffer, src=source)
        return buffer.to("cpu", copy=True) if keeps else torch.empty(0)

    forms = {name: _form(name, value, objects) for name, value in held.items()}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (stages.rank, forms))
    # stage by stage; within a stage all ranks hold the same names
    by_stage = {stage: (source, forms) for source, (stage, forms) in reversed(list(enumerate(everyone)))}
    values: dict[str, Any] = {}
    for stage, (source, forms) in sorted(by_stage.items()):
        received: dict[int, torch.Tensor] = {}
        for name, form in forms.items():
            first = stages.aliases.get(name, name)
            if first in values:
                values[name] = values[first]
            if name in values:
                continue
            if not isinstance(form, tuple):
                values[name] = form
                continue
            key, shape, dtype = form
            if key not in received:
                whole = full_value(held[name]).contiguous() if stages.rank == stage else None
                received[key] = passed_on(whole, source, shape, dtype)
            values[name] = received[key]
    return values if rank == 0 or everywhere else {}


def _form(name: str, value: Any, objects: Mapping[str, int]) -> Any:
    """(object, shape, dtype) of a tensor; any other value itself."""
    return (objects[name], tuple(value.shape), value.dtype) if isinstance(value, torch.Tensor) else value
