"""Reshard a running model in memory: parameters, buffers and optimizer states go from one layout to another.

state = LiveState.of(model, optimizer)    # before the layout changes; a rank that joins starts with LiveState()
...                                       # put the same model into its new layout, without values
state.check(model, optimizer).fill()      # local boxes are copied, others are sent
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright_checkpoint._torch import local_of, plain_name, unwrapped
from meshwright_checkpoint.format.json_values import decode
from meshwright_checkpoint.format.safetensors_file import DTYPES
from meshwright_checkpoint.rank_messages import Ranks
from meshwright_checkpoint.reshard import transfer
from meshwright_checkpoint.shards.local_shards import local_shards
from meshwright_checkpoint.state import collect
from meshwright_checkpoint.state.optimizer import empty_state, refuse_tensor, scalar_from_text
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.stages.optimizers import own_state
from meshwright_dtensor.stages.whole_model import own_stages
from meshwright_dtensor.tensor.compute_copy import touch

BUFFER = "buffer/"


@dataclass
class LiveState:
    """Model and optimizer state of this rank, before the reshard.

    Attributes:
        collected: the tensors, by key.
        free: tensors whose memory is freed after the transfer.
        optimizer: class, groups by name, and states that are not tensors; None without an optimizer, or on a rank that joins.
        trained: parameter -> requires_grad.
    """

    collected: collect.CollectedState = field(default_factory=collect.CollectedState)
    free: dict[str, torch.Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] | None = None
    trained: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, optimizer: Optimizer | None) -> LiveState:
        """The state of a model and its optimizer on this rank. Nothing is copied.

        Raises UsageError: the optimizer has a parameter that the model does not have, or a parameter has a gradient.
        """
        with own_state(unwrapped(model), optimizer):
            return cls._of(unwrapped(model), optimizer)

    @classmethod
    def _of(cls, inner: nn.Module, optimizer: Optimizer | None) -> LiveState:
        self = cls()
        names = collect.named_tensors(inner)
        for name, tensor in _tensors(inner, names).items():
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                raise UsageError(
                    f"parameter {name.removeprefix(collect.MODEL)} has a gradient, which resharding would lose; call "
                    "optimizer.step() and optimizer.zero_grad() first"
                )
            self.collected.put(name, tensor)
            if isinstance(tensor, DTensor):
                self.free[name] = tensor
        for name, parameter in inner.named_parameters(remove_duplicate=False):
            self.trained[plain_name(name)] = parameter.requires_grad
        if optimizer is not None:
            self.optimizer = collect.collect_optimizer(optimizer, names, self.collected)
            for group, params in zip(
                optimizer.param_groups, collect.parameter_names(optimizer, names), strict=True
            ):
                for name, parameter in zip(params, group["params"], strict=True):
                    for key, value in optimizer.state.get(parameter, {}).items():
                        if isinstance(value, DTensor):
                            self.free[f"{collect.OPTIMIZER}{name}/{key}"] = value
        return self

    def check(
        self, model: nn.Module, optimizer: Optimizer | None, *, ranks: Ranks | None = None, here: bool = True
    ) -> PlannedReshard:
        """Plan the reshard and raise all errors, before anything changes (a collective call).

        Args:
            model: in its new layout; parameters without memory are allocated one after the other.
            optimizer: the optimizer of the old layout. On a rank that joins, a new one of the same class and groups.
            ranks: all ranks of the old or the new layout.
            here: False on a rank that leaves.

        Raises:
            UsageError: optimizers differ between ranks.
            MismatchError: no rank has a tensor that the model needs.
        """
        ranks = ranks or Ranks()
        # of all stages
        parameters = dict(unwrapped(model).named_parameters()) if here else {}
        with own_stages(unwrapped(model)):
            names, want, mine = ranks.run_checked(lambda: self._offer(model, optimizer, here))
            gathered = ranks.gather(mine)
            new_optimizer: _NewOptimizer | None = None
            if optimizer is not None:
                new_optimizer = ranks.run_checked(
                    lambda: _NewOptimizer.of(gathered, optimizer, parameters, names, want)
                )
            plan = transfer.plan_rounds(self.collected.shards, want.shards, ranks)
        return PlannedReshard(self, optimizer, ranks, names, want, new_optimizer, plan)

    def _offer(
        self, model: nn.Module, optimizer: Optimizer | None, here: bool
    ) -> tuple[collect.NamedTensors, collect.CollectedState, list[Any]]:
        """Names and wanted tensors of this rank, and its description for the other ranks."""
        inner = unwrapped(model)
        names = collect.named_tensors(inner) if here else collect.NamedTensors()
        want = collect.CollectedState()
        for key, tensor in (_tensors(inner, names) if here else {}).items():
            want.put(key, tensor)
        form = None if optimizer is None else [type(optimizer).__qualname__, len(optimizer.param_groups)]
        return names, want, [self.optimizer, collect.describe_shards(self.collected.shards), form]


@dataclass
class PlannedReshard:
    """A reshard that all ranks have checked."""

    state: LiveState
    optimizer: Optimizer | None
    ranks: Ranks
    names: collect.NamedTensors
    want: collect.CollectedState
    new_optimizer: _NewOptimizer | None
    plan: list[transfer.Round]

    def fill(self) -> transfer.TransferStats:
        """Fill the model, and point the optimizer to its parameters (a collective call)."""
        state = self.state
        have, want = state.collected.shards, self.want.shards
        stats = transfer.run_rounds(self.plan, have, want, state.free, self.ranks)
        touch(list(self.names.tensors.values()))
        if self.new_optimizer is not None and self.optimizer is not None:
            self.new_optimizer.install(self.optimizer)
        return stats


def _tensors(model: nn.Module, names: collect.NamedTensors) -> dict[str, torch.Tensor]:
    """Key -> parameters and buffers, including non-persistent buffers."""
    tensors = {collect.MODEL + name: tensor for name, tensor in names.tensors.items()}
    for name, buffer in model.named_buffers():
        if id(buffer) not in names.names:
            tensors[BUFFER + plain_name(name)] = buffer
    return tensors


@dataclass
class _NewOptimizer:
    """Groups and states of the optimizer for the new parameters."""

    groups: list[list[torch.Tensor]]
    options: list[dict[str, Any]]
    states: list[tuple[torch.Tensor, dict[str, Any]]]

    @classmethod
    def of(
        cls,
        gathered: list[Any],
        optimizer: Optimizer,
        parameters: Mapping[str, torch.Tensor],
        names: collect.NamedTensors,
        want: collect.CollectedState,
    ) -> _NewOptimizer:
        """New groups of `parameters`, and new states of those in `names`, which are also added to `want`.

        Raises UsageError if ranks have different optimizers.
        """
        states, shards_of_ranks, kinds = zip(*gathered, strict=True)
        optimizers = [state for state in states if state is not None]
        having = [rank for rank, state in enumerate(states) if state is not None]
        if any(kind != kinds[0] for kind in kinds):
            raise UsageError(
                f"ranks have different optimizers ({list(kinds)}); create the same class with the same groups on every rank"
            )
        group_of = _numbers_of_groups(optimizers, having)
        keys: dict[str, dict[str, list[Any]]] = {}
        values: dict[str, dict[str, Any]] = {}
        for shards in shards_of_ranks:
            for key, kind in shards.items():
                if key.startswith(collect.OPTIMIZER):
                    name, _, state = key.removeprefix(collect.OPTIMIZER).rpartition("/")
                    keys.setdefault(name, {})[state] = kind
        for saved in optimizers:
            values.update(saved["values"])
        self = cls([[] for _ in optimizer.param_groups], [], [])
        self.options = [decode(group["options"], scalar_from_text) for group in optimizers[0]["groups"]]
        for raw, parameter in parameters.items():
            name = plain_name(raw)
            if name not in group_of:
                continue
            number = group_of[name]
            self.groups[number].append(parameter)
            # of this rank's stages
            if name in names.tensors:
                options = {**optimizer.defaults, **self.options[number]}
                entries = _empty_states(name, keys.get(name, {}), parameter, options, want)
                entries.update(
                    (key, decode(value, refuse_tensor)) for key, value in values.get(name, {}).items()
                )
                self.states.append((parameter, entries))
        return self

    def install(self, optimizer: Optimizer) -> None:
        """Point the optimizer to the new parameters. It stays the same object, so schedulers go on."""
        for group, parameters, options in zip(optimizer.param_groups, self.groups, self.options, strict=True):
            group["params"] = list(parameters)
            for key, value in options.items():
                if not isinstance(group.get(key), torch.Tensor):
                    group[key] = value
        optimizer.state.clear()
        for parameter, state in self.states:
            if state:
                optimizer.state[parameter] = state


def _numbers_of_groups(optimizers: Sequence[Any], ranks: Sequence[int]) -> dict[str, int]:
    """Name of a parameter -> number of its group. Raises UsageError if these ranks have different groups or options."""
    group_of: dict[str, int] = {}
    for rank, saved in zip(ranks, optimizers, strict=True):
        for number, group in enumerate(saved["groups"]):
            here, first = group["options"], optimizers[0]["groups"][number]["options"]
            name = next((n for n in {**first, **here} if here.get(n) != first.get(n)), None)
            if name is not None:
                raise UsageError(
                    f"group {number} of the optimizer has {name}={here.get(name)} on rank {rank}, and {name}={first.get(name)} "
                    f"on rank {ranks[0]}; set the same options on all ranks"
                )
            for name in group["params"]:
                if group_of.setdefault(name, number) != number:
                    raise UsageError(f"{name} is in different groups of the optimizer on different ranks")
    return group_of


def _empty_states(
    name: str,
    kinds: dict[str, list[Any]],
    parameter: torch.Tensor,
    options: dict[str, Any],
    want: collect.CollectedState,
) -> dict[str, Any]:
    """States of a parameter without memory, which are added to `want`. `kinds`: state -> its shape and dtype."""
    entries: dict[str, Any] = {}
    for state, (shape, dtype, _) in kinds.items():
        value = empty_state(tuple(shape), DTYPES[dtype], state, parameter, options)
        transfer.deallocate(local_of(value))
        key = f"{collect.OPTIMIZER}{name}/{state}"
        want.shards[key] = local_shards(value, key, parameter)
        entries[state] = value
    return entries
