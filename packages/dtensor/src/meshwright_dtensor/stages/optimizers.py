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
            number = type(value) is torch.Tensor and not value.dim()
            if isinstance(value, torch.Tensor) and not number and not isinstance(value, StageValue):
                value = value if parameter.here else meta_like(value)
                entries[key] = staged(value, parameter.whole_model, parameter.holders, parameter.device)


@contextlib.contextmanager
def own_state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, `model` and `optimizer` have the parameters, buffers and states of this rank's stages only."""
    groups = [] if optimizer is None else optimizer.param_groups
    states: Any = {} if optimizer is None else optimizer.state
    before = [group["params"] for group in groups]
    of_others: dict[torch.Tensor, Any] = {}
    for parameter, entries in list(states.items()):
        if isinstance(parameter, StageTensor):
            of_others[parameter] = states.pop(parameter)
        elif isinstance(parameter, StageValue):
            entries.update((key, value_of(value)) for key, value in list(entries.items()))
    for group in groups:
        group["params"] = [p for p in group["params"] if not isinstance(p, StageTensor)]
    try:
        with own_stages(model):
            yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        states.update(of_others)
        if optimizer is not None and not steps_each_parameter(optimizer):
            show_states(optimizer)
