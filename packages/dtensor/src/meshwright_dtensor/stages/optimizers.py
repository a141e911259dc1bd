"""Optimizers over the parameters of all pipeline stages: what a stage steps by itself, and what a checkpoint has of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from meshwright_dtensor.stages.stage_tensor import StageTensor, StageValue, meta_like, staged, value_of
from meshwright_dtensor.stages.whole_model import own_stages


def steps_each_parameter(optimizer: Optimizer) -> bool:
    """Whether no value of one parameter is used for another, so that each stage steps its own: true of torch's, but LBFGS.

    All others see the parameters of all stages in a step.
    """
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(optimizer, LBFGS)


def show_states(optimizer: Optimizer) -> None:
    """Show the states of an optimizer that sees all stages as its parameters are shown."""
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, StageValue) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            # a count of steps is the same on every rank
            if isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, StageValue):
                value = value if parameter.here else meta_like(value)
                entries[key] = staged(value, parameter.whole_model, parameter.holders, parameter.device)


@contextlib.contextmanager
def own_state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, `model` and `optimizer` have the parameters, buffers and states of this rank's stages only."""
    groups = [] if optimizer is None else optimizer.param_groups
    before = [group["params"] for group in groups]
    if not any(isinstance(p, StageValue) for parameters in before for p in parameters):
        with own_stages(model):
            yield
        return
    assert optimizer is not None
    of_others: dict[torch.Tensor, Any] = {}
    for parameter, entries in list(optimizer.state.items()):
        if isinstance(parameter, StageTensor):
            of_others[parameter] = optimizer.state.pop(parameter)
        elif isinstance(entries, dict):
            entries.update((key, value_of(value)) for key, value in list(entries.items()))
    for group in groups:
        group["params"] = [p for p in group["params"] if not isinstance(p, StageTensor)]
    try:
        with own_stages(model):
            yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        optimizer.state.update(of_others)
        if not steps_each_parameter(optimizer):
            show_states(optimizer)
