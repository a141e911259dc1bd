"""Shard the batch at the model's entry: plain tensors, which are global values, become global tensors.

Also the registry of the live parallel models, so that `shard_loader(loader)` needs no model.

The name of a batch tensor is its keyword or position, followed by the path inside containers ("input_ids", "0",
"features.image"). The rows of the batch are dim 0 of its first tensor that has dims.
"""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshwright_dtensor._torch.modes import outside_functorch
from meshwright_dtensor.api import distribute
from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.model.batch_size import BatchSize
from meshwright_dtensor.model.precision import DTYPES
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.sharding.states import State, is_shard
from meshwright_dtensor.strategy import Strategy
from meshwright_dtensor.tensor.global_tensor import GlobalTensor
from meshwright_parallel._torch.core import map_tensors

_ATTRIBUTE = "_meshwright_placed"
LIVE: WeakSet[ModelPlacement] = WeakSet()
"""Placements of the parallel models of this process, for `shard_loader`."""


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
            states = self.input_states(name, tensor.shape, size)
            if outside_functorch(tensor) is not tensor and any(is_shard(state) for state in states):
                raise UnsupportedError(
                    f"input {name!r} of a parallel model is inside of a functorch transform (torch.func, vmap), and its rows or "
                    "tokens would be divided over ranks, which transforms cannot follow; call the model once for each element, or "
                    "transform the modules inside"
                )
            return distribute(tensor, self.mesh, states)

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


def only_live_placement() -> ModelPlacement:
    """The placement of the parallel models that are alive in this process, if all have the same.

    Raises UsageError: no model is parallel, or two models have different meshes.
    """
    # a module and its hooks are a cycle, so dropped models may still be alive
    gc.collect()
    placements = list(LIVE)
    if not placements:
        text = "no model is parallel yet; call parallelize() or auto_parallelize() before looping over the loader"
        raise UsageError(text)
    first = placements[0]
    for other in placements[1:]:
        if _axes(other) != _axes(first):
            raise UsageError(
                f"models with different meshes are alive ({dict(first.plan.degrees)} and {dict(other.plan.degrees)}); "
                "say which of them the loader feeds: shard_loader(loader, model=model)"
            )
    return first


def _axes(placement: ModelPlacement) -> list[tuple[tuple[str, int], str]]:
    names = (strategy.name for strategy in placement.strategies)
    return list(zip(placement.plan.degrees.items(), names, strict=True))


def install_inputs(model: nn.Module, placement: ModelPlacement) -> None:
    """Make every call of `model` distribute its batch first."""
    model.__dict__[_ATTRIBUTE] = placement
    model.register_forward_pre_hook(_distribute, prepend=True, with_kwargs=True)


def _distribute(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    placement = placement_of(model)
    return (args, kwargs) if placement is None else placement.place(args, kwargs)
