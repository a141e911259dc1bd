"""Steps of elementwise optimizers on local tensors: parameters, gradients and states.

A step on DTensors has Python dispatch for each of a dozen small functions per parameter. Elementwise optimizers do not need
it. So the step runs on a copy of the optimizer whose parameters and states are the local tensors, for which torch has
multi-tensor kernels. The user's optimizer keeps its DTensor parameters and states, which share memory with the copy's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop

from meshwright_dtensor.parameter import MeshParameter, state_like
from meshwright_dtensor.stored.elementwise import parts_correspond
from meshwright_dtensor.tensor.compute_copy import touch
from meshwright_parallel._torch.core import local_of

ELEMENTWISE = frozenset({SGD, ASGD, NAdam, Adadelta, Adagrad, Adam, Adamax, AdamW, RAdam, RMSprop, Rprop})
"""Exactly these classes: a subclass may need whole tensors."""
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States with one number per parameter."""


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy of the optimizer over local tensors, for one step; None where the step needs DTensors."""
    if type(optimizer) not in ELEMENTWISE or optimizer.defaults.get("differentiable"):
        return None
    groups: list[dict[str, Any]] = []
    states: dict[Any, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        locals_ = []
        for parameter in group["params"]:
            mine = isinstance(parameter, MeshParameter)
            if not mine and isinstance(parameter, DTensor):
                return None
            local = local_of(parameter) if mine else parameter
            locals_.append(local)
            if parameter in optimizer.state:
                entries = _local_entries(parameter, optimizer.state[parameter])
                if entries is None:
                    return None
                states[local] = entries
        groups.append({**group, "params": locals_})
    local_copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    local_copy.__dict__.update(optimizer.__dict__)
    local_copy.param_groups = groups
    local_copy.state = type(optimizer.state)(dict, states)  # type: ignore[call-arg]
    return local_copy


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


def copy_states_back(optimizer: torch.optim.Optimizer, local_copy: torch.optim.Optimizer) -> None:
    """Put the states of the local copy into the user's optimizer after a step."""
    for group, local_group in zip(optimizer.param_groups, local_copy.param_groups, strict=True):
        for parameter, local in zip(group["params"], local_group["params"], strict=True):
            if local not in local_copy.state:
                continue
            entries, local_entries = optimizer.state[parameter], local_copy.state[local]
            if not isinstance(parameter, MeshParameter):
                entries.update(local_entries)
                continue
            if local.grad is not None:
                # fused kernels do not increase version counters
                touch(parameter)
            for key, value in local_entries.items():
                old = entries.get(key)
                if isinstance(old, DTensor) and local_of(old) is value:
                    continue
                shaped = isinstance(value, torch.Tensor) and value.shape == local.shape
                entries[key] = state_like(parameter, value) if shaped and key not in NUMBERS else value
