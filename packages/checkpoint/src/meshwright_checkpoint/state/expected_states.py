"""Bytes of the states that an optimizer will have after its first step, before it has taken one."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.optim import Optimizer

from meshwright_dtensor.utils.step_copy import step_copy

MOST_ELEMENTS = 1 << 16
"""Of a tensor of which a step is tried."""


def is_predictable(optimizer: Optimizer) -> bool:
    """Whether the states of an optimizer are known before its first step: those of torch's own classes."""
    return type(optimizer).__module__.startswith("torch.optim.") and not isinstance(
        optimizer, torch.optim.LBFGS
    )


def bytes_per_element(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, float]:
    """Name -> bytes of states for each element, of parameters that will have states and have none.

    names: id of a parameter -> its name. States that do not have the shape of the parameter (a count of steps, the
    factors of Adafactor) count nothing: they are small.
    """
    expected: dict[str, float] = {}
    tried: dict[tuple[int, torch.Size, torch.dtype], float] = {}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if not parameter.requires_grad or parameter in optimizer.state:
                continue
            shape = _smaller(parameter.shape)
            key = (number, shape, parameter.dtype)
            if key not in tried:
                tried[key] = _try(
                    optimizer, group, torch.ones(shape, dtype=parameter.dtype, device=parameter.device)
                )
            expected[names[id(parameter)]] = tried[key]
    return expected


def _smaller(shape: torch.Size) -> torch.Size:
    """A shape of as many dims and at most so many elements."""
    sizes = list(shape)
    while prod(sizes) > MOST_ELEMENTS:
        largest = sizes.index(max(sizes))
        sizes[largest] = -(-sizes[largest] // 2)
    return torch.Size(sizes)


@torch.no_grad()
def _try(optimizer: Optimizer, group: Mapping[str, Any], tensor: torch.Tensor) -> float:
    """Bytes of states for each element of a tensor, of which a copy of the optimizer takes a step."""
    if not tensor.numel():
        return 0.0
    tensor.grad = torch.zeros_like(tensor)
    copied = step_copy(optimizer, defaultdict(dict))
    copied.param_groups = [{**group, "params": [tensor]}]
    # of the class and without hooks: schedulers and others put a function of the original into the instance
    inspect.unwrap(type(optimizer).step)(copied)
    states = [value for value in copied.state[tensor].values() if isinstance(value, torch.Tensor)]
    return (
        sum(state.nbytes for state in states if state.shape == tensor.shape and state.dim()) / tensor.numel()
    )
