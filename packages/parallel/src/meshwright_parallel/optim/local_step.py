"""Steps of stock optimizers that go element by element, on the local parts of parameters, gradients and states.

A step on DTensors pays torch's Python dispatch for each of a dozen small functions per parameter.  What these optimizers
compute for an element depends on nothing else, so the step runs on a twin of the optimizer whose parameters and states are
the local tensors: plain tensors, for which torch takes its multi-tensor kernels on accelerators too.  The user's optimizer
keeps its DTensor parameters and states, which share memory with the twin's.
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
"""Exactly these classes: one derived from them may look at whole tensors."""
NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""States that are one number per parameter."""


def local_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer over local tensors, for one step; None where the step has to see DTensors."""
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
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.param_groups = groups
    twin.state = type(optimizer.state)(dict, states)  # type: ignore[call-arg]
    return twin


def _local_entries(parameter: Any, entries: Mapping[str, Any]) -> dict[str, Any] | None:
    found = {}
    for key, value in entries.items():
        if isinstance(value, DTensor):
            if not isinstance(parameter, MeshParameter) or not parts_correspond(parameter, value):
                return None  # stock DTensor brings it there, or says why not
            value = local_of(value)
        found[key] = value
    return found


def copy_states_back(optimizer: torch.optim.Optimizer, twin: torch.optim.Optimizer) -> None:
    """Show in the user's optimizer what the step of its twin made."""
    for group, local_group in zip(optimizer.param_groups, twin.param_groups, strict=True):
        for parameter, local in zip(group["params"], local_group["params"], strict=True):
            if local not in twin.state:
                continue
            entries, made = optimizer.state[parameter], twin.state[local]
            if not isinstance(parameter, MeshParameter):
                entries.update(made)
                continue
            if local.grad is not None:
                touch(parameter)  # fused kernels count no versions
            for key, value in made.items():
                old = entries.get(key)
                if isinstance(old, DTensor) and local_of(old) is value:
                    continue
                shaped = isinstance(value, torch.Tensor) and value.shape == local.shape
                entries[key] = state_like(parameter, value) if shaped and key not in NUMBERS else value
