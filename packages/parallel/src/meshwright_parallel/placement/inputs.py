"""Shard the batch at the model's entry: plain tensors, which are global values, become global tensors.

The name of a batch tensor is its keyword or position, followed by the path inside containers ("input_ids", "0",
"features.image"). The rows of the batch are dim 0 of its first tensor that has dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor.api import distribute
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_parallel._torch.core import map_tensors

_ATTRIBUTE = "_meshwright_placed"


@dataclass(frozen=True, eq=False)
class ModelPlacement:
    """Plan and mesh of a parallel model, and the strategy of each mesh axis, in mesh order.

    `plain`: the mesh is one rank, and the model runs on ordinary tensors.
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    strategies: tuple[Strategy, ...]
    plain: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelPlacement:
        # a copied model is on the same mesh
        return self

    def input_states(self, name: str, shape: Sequence[int], size: BatchSize) -> tuple[State, ...]:
        """See the function `input_states`; `size` is that of the batch."""
        return input_states(self.plan, self.strategies, name, shape, size)

    def place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Distribute every plain tensor among the arguments, in the plan's precision."""
        if self.plain:
            return args, kwargs
        size = size_of(args, kwargs)
        dtype = None if self.plan.precision is None else DTYPES[self.plan.precision.parameters]

        def distributed(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if dtype is not None and tensor.dtype == torch.float32:
                tensor = tensor.to(dtype)
            if isinstance(tensor, (GlobalTensor, DTensor)):
                return tensor
            return distribute(tensor, self.mesh, self.input_states(name, tensor.shape, size))

        return map_tensors(distributed, args, kwargs)


def input_states(
    plan: ParallelPlan, strategies: Sequence[Strategy], name: str, shape: Sequence[int], size: BatchSize
) -> tuple[State, ...]:
    """The state of batch tensor `name` of global `shape` on each mesh axis of `plan`."""
    rows = size.rows
    states: list[State] = []
    for degree, strategy in zip(plan.degrees.values(), strategies, strict=True):
        # an inner axis shards the rows that the outer axes leave to one rank
        local_shape = shape if not states or 0 not in states else (rows or 0, *shape[1:])
        local_size = BatchSize(rows, size.tokens)
        state = strategy.batch_state(name, local_shape, local_size, degree, plan) if degree > 1 else "I"
        if state == 0 and rows is not None:
            rows //= degree
        states.append(state)
    return tuple(states)


def size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchSize:
    """Rows and tokens of the batch."""
    tensors: list[tuple[Sequence[int], bool]] = []

    def collect(name: str, tensor: torch.Tensor) -> torch.Tensor:
        tensors.append((tensor.shape, tensor.is_floating_point()))
        return tensor

    map_tensors(collect, tuple(args), dict(kwargs))
    return BatchSize.of(tensors)


def placement_of(model: nn.Module) -> ModelPlacement | None:
    """The placement of a parallel model, None for any other."""
    placement = model.__dict__.get(_ATTRIBUTE)
    return placement if isinstance(placement, ModelPlacement) else None


def install_inputs(model: nn.Module, placement: ModelPlacement) -> None:
    """Make every call of `model` distribute its batch first."""
    model.__dict__[_ATTRIBUTE] = placement
    model.register_forward_pre_hook(_distribute, prepend=True, with_kwargs=True)


def _distribute(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    placement = placement_of(model)
    return (args, kwargs) if placement is None else placement.place(args, kwargs)
