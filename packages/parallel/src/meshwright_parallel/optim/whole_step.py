"""Steps of stock optimizers that look at whole matrices: each parameter is stepped whole, on every rank, one after the other.

Muon makes the rows of an update orthogonal by products of bfloat16 matrices.  On shards each product would be a sum of
rounded parts, several percent away from one device and communicated five times over; gathered once, it is one device's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Muon

from meshwright_dtensor.parameter import MeshParameter, state_like
from meshwright_dtensor.stored.permuted import like_parameter
from meshwright_parallel._torch.core import local_of

WHOLE = frozenset({Muon})
"""Exactly these classes, which step one parameter after the other."""


def whole_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer over whole tensors, for one step; None where the step may see DTensors."""
    if type(optimizer) not in WHOLE:
        return None
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__dict__.update(optimizer.__dict__)
    twin.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    twin.param_groups = _OneByOne(optimizer, twin.state)  # type: ignore[assignment]
    return twin


class _OneByOne:
    """Groups of one parameter each, which is whole until the next is asked for."""

    def __init__(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        self._optimizer, self._state = optimizer, state

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                entries = self._optimizer.state
                if not isinstance(parameter, MeshParameter):
                    if parameter in entries:
                        self._state[parameter] = entries[parameter]
                    yield {**group, "params": [parameter]}
                    if parameter in self._state:
                        entries[parameter] = self._state.pop(parameter)
                elif parameter.grad is not None:
                    whole = _whole(parameter)
                    whole.grad = _whole(parameter.grad)
                    if parameter in entries:
                        self._state[whole] = {key: _whole(value) for key, value in entries[parameter].items()}
                    yield {**group, "params": [whole]}
                    parameter.copy_(whole)
                    _take_part(parameter, entries[parameter], self._state.pop(whole))


def _whole(value: Any) -> Any:
    """A copy that may be written to."""
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value


def _take_part(parameter: MeshParameter, entries: dict[str, Any], made: dict[str, Any]) -> None:
    """Keep this rank's part of what has the parameter's shape."""
    for key, value in made.items():
        old = entries.get(key)
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            entries[key] = value
            continue
        part = local_of(like_parameter(value, parameter))
        if isinstance(old, DTensor):
            local_of(old).copy_(part)
        else:
            entries[key] = state_like(parameter, part)
