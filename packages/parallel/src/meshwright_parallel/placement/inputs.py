"""How a batch enters a parallel model: plain tensors, which are global values, become global tensors.

A batch tensor is known by the keyword or position at which it is passed, followed by the path inside containers
("input_ids", "0", "features.image"). The rows of the batch are dim 0 of its first tensor that has dims.
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
    """What `parallelize` did to a model: plan, mesh, and the strategy of each mesh axis, in mesh order.

    `plain`: the model is run on ordinary tensors, its mesh being one rank.
    """

    plan: ParallelPlan
    mesh: DeviceMesh
    strategies: tuple[Strategy, ...]
    plain: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> ModelPlacement:
        return self  # a copied model lies on the same mesh

    def input_states(self, name: str, shape: Sequence[int], size: BatchSize) -> tuple[State, ...]:
        """The state of batch tensor `name` of global `shape` on each mesh axis; `size` is that of the batch."""
        return input_states(self.plan, self.strategies, name, shape, size)

    def place(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The same arguments with every plain tensor distributed; tensors that are placed already stay."""
        if self.plain:
            return args, kwargs
        size = size_of(args, kwargs)
        dtype = None if self.plan.precision is None else DTYPES[self.plan.precision.parameters]

        def one(name: str, tensor: torch.Tensor) -> torch.Tensor:
            if dtype is not None and tensor.dtype == torch.float32:
                tensor = tensor.to(dtype)  # the model is computed in it
            if isinstance(tensor, (GlobalTensor, DTensor)):
                return tensor
            return distribute(tensor, self.mesh, self.input_states(name, tensor.shape, size))

        return map_tensors(one, args, kwargs)


def input_states(
    plan: ParallelPlan, strategies: Sequence[Strategy], name: str, shape: Sequence[int], size: BatchSize
) -> tuple[State, ...]:
    """The state of batch tensor `name` of global `shape` on each mesh axis of `plan`."""
    left = size.rows
    states: list[State] = []
    for degree, strategy in zip(plan.degrees.values(), strategies, strict=True):
        # an axis further in sees the rows that those further out have left
        seen = shape if not states or 0 not in states else (left or 0, *shape[1:])
        here = BatchSize(left, size.tokens)
        state = strategy.batch_state(name, seen, here, degree, plan) if degree > 1 else "I"
        if state == 0 and left is not None:
            left //= degree
        states.append(state)
    return tuple(states)


def size_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> BatchSize:
    """Rows and tokens of the batch."""
    found: list[tuple[Sequence[int], bool]] = []

    def look(name: str, tensor: torch.Tensor) -> torch.Tensor:
        found.append((tensor.shape, tensor.is_floating_point()))
        return tensor

    map_tensors(look, tuple(args), dict(kwargs))
    return BatchSize.of(found)


def placement_of(model: nn.Module) -> ModelPlacement | None:
    """What `parallelize` did to `model`, or None."""
    found = model.__dict__.get(_ATTRIBUTE)
    return found if isinstance(found, ModelPlacement) else None


def install_inputs(model: nn.Module, placed: ModelPlacement) -> None:
    """Make every call of `model` distribute its batch first."""
    model.__dict__[_ATTRIBUTE] = placed
    model.register_forward_pre_hook(_distribute, prepend=True, with_kwargs=True)


def _distribute(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    placed = placement_of(model)
    return (args, kwargs) if placed is None else placed.place(args, kwargs)
