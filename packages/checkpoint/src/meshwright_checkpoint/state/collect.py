"""Collect the state to save, by key: model, optimizer, random streams and the user's extra values.

Keys of tensors in a checkpoint: ``model/<name>``, ``optimizer/<parameter>/<state>``, ``rng/<rank>/<stream>``, ``extra/...``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright_checkpoint._torch import is_extra_state, plain_name, unwrapped
from meshwright_checkpoint.format.json_values import encode
from meshwright_checkpoint.format.safetensors_file import dtype_name
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.shards.local_shards import LocalShards, local_shards
from meshwright_checkpoint.state import rng
from meshwright_checkpoint.state.optimizer_set import AnyOptimizer, OptimizerSet, class_name
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.mesh.context import follow_call
from meshwright_dtensor.model.stage_info import aliases_in

MODEL, OPTIMIZER, EXTRA = "model/", "optimizer/", "extra/"


def check_model(what: str, model: object) -> None:
    """Raise UsageError for anything that is not a module."""
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{what}(model=...) must be an nn.Module, and is of type {type(model).__name__}; pass the model itself"
        )


def check_call(what: str, model: nn.Module) -> None:
    """Raise UsageError for anything that is not a module, or if another rank makes another call."""
    check_model(what, model)
    follow_call(next(model.parameters(), None), what)


def optimizer_given(model: nn.Module, optimizer: AnyOptimizer) -> bool | None:
    """Whether an optimizer is given; None if this rank has no trainable parameters and needs none."""
    if optimizer is not None:
        return True
    return False if any(parameter.requires_grad for parameter in model.parameters()) else None


@dataclass
class NamedTensors:
    """Parameters and buffers of a model by name. A tied tensor appears under its first name.

    tensors: name -> the tensor object.
    aliases: other name -> first name.
    names: id of a tensor -> its first name.
    extra_state: name in the state dict -> extra state of a module.
    """

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    extra_state: dict[str, Any] = field(default_factory=dict)


def named_tensors(model: nn.Module) -> NamedTensors:
    """The tensors of the model's state dict, as the objects that the model uses."""
    names = NamedTensors()
    inner = unwrapped(model)
    # a stage may hold a tied tensor under another name
    first = aliases_in(inner)
    for raw, value in inner.state_dict(keep_vars=True).items():
        name = plain_name(raw)
        if name in first:
            names.aliases[name] = first[name]
            name = first[name]
            if name in names.tensors:
                continue
        if is_extra_state(name):
            names.extra_state[name] = value
        elif not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} in the model's state dict is of type {type(value).__name__}, not a tensor; return it from "
                "get_extra_state()"
            )
        elif id(value) in names.names:
            names.aliases[name] = names.names[id(value)]
        else:
            names.names[id(value)] = name
            names.tensors[name] = value
    return names


@dataclass
class CollectedState:
    """The state of this rank for a save.

    shards: key -> this rank's part.
    metadata: other fields of the manifest. Only the optimizer's groups and values differ between ranks.
    """

    shards: dict[str, LocalShards] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)

    def put(self, key: str, tensor: torch.Tensor, parameter: torch.Tensor | None = None) -> str:
        """Add a tensor."""
        if key in self.shards:
            raise UsageError(f"two tensors have the key {key}; rename one of them")
        self.shards[key] = local_shards(tensor, key, parameter)
        return key


def describe_shards(shards: Mapping[str, LocalShards]) -> dict[str, Any]:
    """Shape, dtype and boxes of each tensor, as JSON for the other ranks."""
    return {
        key: [list(part.shape), dtype_name(part.dtype, key), [there for there, _ in part.boxes]]
        for key, part in shards.items()
    }


def collect(
    model: nn.Module, optimizer: AnyOptimizer, extra: Any, ranks: Ranks, shared: set[str]
) -> CollectedState:
    """Collect the state. `shared`: random streams that are equal on all ranks, which rank 0 saves."""
    collected, rank = CollectedState(), ranks.rank
    inner = unwrapped(model)
    names = named_tensors(inner)
    for name, tensor in names.tensors.items():
        collected.put(MODEL + name, tensor)
    plan = getattr(inner, "parallel_plan", None)
    put = _putter(collected, "model_extra_state/")
    collected.metadata = {
        "plan": None if plan is None else json.loads(plan.to_json()),
        "model": {
            "cls": type(inner).__qualname__,
            "config": config_of(inner),
            "aliases": names.aliases,
            "extra_state": {name: encode(value, put, name) for name, value in names.extra_state.items()},
        },
        "optimizer": None if optimizer is None else collect_optimizer(optimizer, names, collected),
        "rng": {"streams": {}},
    }
    for name, state in rng.state().items():
        if rank == 0 or name not in shared:
            collected.put(f"rng/{rank}/{name}", state)
            collected.metadata["rng"]["streams"][name] = 1 if name in shared else ranks.size
    if rank == 0:
        collected.metadata["extra"] = encode(extra, _putter(collected, EXTRA), "extra")
    return collected


def _putter(collected: CollectedState, prefix: str) -> Callable[[str, torch.Tensor], str]:
    def put(path: str, tensor: torch.Tensor) -> str:
        if hasattr(tensor, "device_mesh"):
            text = f"{path} is a DTensor, and extra values must be plain tensors; pass its full_tensor()"
            raise UsageError(text)
        return collected.put(prefix + path, tensor)

    return put


def config_of(model: nn.Module) -> dict[str, Any] | None:
    """The config of a transformers model, with which a checkpoint can be exported; None for another."""
    config: Any = getattr(model, "config", None)
    text = config.to_json_string(use_diff=False) if hasattr(config, "to_json_string") else None
    try:
        data = json.loads(text) if isinstance(text, str) else None
        json.dumps(data, allow_nan=False)
    except ValueError:
        return None
    return data if isinstance(data, dict) else None


def parameter_names(optimizer: Optimizer | OptimizerSet, names: NamedTensors) -> list[list[str]]:
    """Parameter names of each group. Raises UsageError for a parameter that is not in the model."""
    result = []
    for number, group in enumerate(optimizer.param_groups):
        group_names = [names.names.get(id(p)) for p in group["params"]]
        if None in group_names:
            raise UsageError(
                f"parameter {group_names.index(None)} of the optimizer's group {number} is not a parameter of the model; create "
                "the optimizer from model.parameters(), after parallelize()"
            )
        result.append([name for name in group_names if name is not None])
    return result


def collect_optimizer(
    optimizer: Optimizer | OptimizerSet, names: NamedTensors, collected: CollectedState
) -> dict[str, Any]:
    """Class, groups, and states that are not tensors. Tensors are added to `collected`."""
    groups, values = [], {}
    for group, params in zip(optimizer.param_groups, parameter_names(optimizer, names), strict=True):
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        groups.append({"params": params, "options": encode(options, _inline, "options")})
        for name, parameter in zip(params, group["params"], strict=True):
            rest = {}
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    collected.put(f"{OPTIMIZER}{name}/{key}", value, parameter)
                else:
                    rest[key] = encode(value, _refuse, f"optimizer state {key} of {name}")
            if rest:
                values[name] = rest
    return {"cls": class_name(optimizer), "groups": groups, "values": values}


def _inline(path: str, tensor: torch.Tensor) -> str:
    """A 0-dim tensor, such as a learning rate, as text: dtype and hexadecimal number."""
    if tensor.dim() or not tensor.dtype.is_floating_point:
        raise UsageError(
            f"optimizer option {path} is a tensor of shape {list(tensor.shape)}; only 0-dim floats can be saved"
        )
    return f"{str(tensor.dtype).removeprefix('torch.')}:{float(tensor.item()).hex()}"


def _refuse(path: str, tensor: torch.Tensor) -> str:
    text = f"{path} holds a tensor inside another value, which cannot be resharded; save it in `extra`"
    raise UsageError(text)
