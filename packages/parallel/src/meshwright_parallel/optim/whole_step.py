"""Steps of optimizers that need whole matrices: each parameter is gathered, and stepped on every rank, one after the other.

Muon orthogonalises the rows of an update by products of bfloat16 matrices. On shards each product would be a sum of rounded
parts, several percent away from one device, and communicated five times. Gathered once, the update equals that of one device.
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
"""Exactly these classes, which step one parameter at a time."""


def whole_optimizer(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """A copy of the optimizer over whole tensors, for one step; None for other classes."""
    if type(optimizer) not in WHOLE:
        return None
    whole_copy: torch.optim.Optimizer = object.__new__(type(optimizer))
    whole_copy.__dict__.update(optimizer.__dict__)
    whole_copy.state = type(optimizer.state)(dict)  # type: ignore[call-arg]
    whole_copy.param_groups = _GatheredGroups(optimizer, whole_copy.state)  # type: ignore[assignment]
    return whole_copy


class _GatheredGroups:
    """Groups of one parameter each, which is gathered while it is stepped."""

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
                    _store_local(parameter, entries[parameter], self._state.pop(whole))


def _whole(value: Any) -> Any:
    """A gathered copy that may be written to."""
    return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value


def _store_local(parameter: MeshParameter, entries: dict[str, Any], whole: dict[str, Any]) -> None:
    """Keep this rank's part of states that have the parameter's shape."""
    for key, value in whole.items():
        old = entries.get(key)
        if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            entries[key] = value
            continue
        part = local_of(like_parameter(value, parameter))
        if isinstance(old, DTensor):
            local_of(old).copy_(part)
        else:
            entries[key] = state_like(parameter, part)
