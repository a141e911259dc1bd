"""Optimizers over the parameters of all pipeline stages: what a stage steps by itself, and what a checkpoint has of it."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, wraps
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, Optimizer

from meshwright_dtensor._torch.core import pytree
from meshwright_dtensor.stages.stage_tensor import (
    StageTensor,
    StageValue,
    meta_like,
    set_held_gradient,
    staged,
    value_of,
)
from meshwright_dtensor.stages.whole_model import WholeModel, own_stages, whole_model_among


def steps_each_parameter(optimizer: Optimizer) -> bool:
    """Whether no value of one parameter is used for another, so that each stage steps its own: true of torch's, but LBFGS,
    and of torchao's.

    All others see the parameters of all stages in a step.
    """
    # torch says that Muon and Adafactor are of torch.optim itself
    of_package = f"{type(optimizer).__module__}.".startswith(("torch.optim.", "torchao.optim."))
    return of_package and not isinstance(optimizer, LBFGS)


def _agreed(name: str) -> Callable[..., Any]:
    def read(states: _StageStates, *args: Any) -> Any:
        states._agree()
        return getattr(defaultdict, name)(states, *args)

    return read


class _StageStates(defaultdict[Any, Any]):
    """The states of an optimizer of which each stage steps its own: read outside of a step, they are those of all stages.

    Attributes: `optimizer`, `model` (the `WholeModel`), and `changed` (a step has run since the states were agreed on).
    """

    optimizer: Optimizer | None = None
    model: WholeModel | None = None
    changed = False

    def _agree(self) -> None:
        """After a step, give every rank the states of other stages (a collective call), as tensors without memory."""
        if self.model is None or self.optimizer is None or not self.changed or self.model.inside:
            return
        self.changed = False
        with self.model.entered():
            given = parameters_of(self.optimizer)
            mine = [p if p in self and not isinstance(p, StageTensor) else None for p in given]
            forms = [
                None if p is None else pytree.tree_map_only(torch.Tensor, meta_like, self[p]) for p in mine
            ]
        of_ranks = self.model.gathered("reads the states of an optimizer", forms)
        held_here = dict(super().items())
        # in the same order on every rank
        self.clear()
        for i, p in enumerate(given):
            entries = of_ranks[min(p.holders)][i] if isinstance(p, StageTensor) else held_here.get(p)
            if entries is not None:
                self[p] = entries
        self.update(
            {key: x for key, x in held_here.items() if key not in self and not isinstance(key, StageTensor)}
        )
        show_states(self.optimizer, numbers=True)

    __getitem__, get, items, values, keys = map(_agreed, ("__getitem__", "get", "items", "values", "keys"))
    __iter__, __len__, __contains__ = map(_agreed, ("__iter__", "__len__", "__contains__"))
    __delitem__, pop, popitem, setdefault = map(_agreed, ("__delitem__", "pop", "popitem", "setdefault"))


def states_changed(optimizer: Optimizer, model: WholeModel) -> None:
    """A step of the optimizer has ended: its states are agreed on when they are read."""
    if not steps_each_parameter(optimizer):
        return
    states: Any = optimizer.state
    if not isinstance(states, _StageStates):
        optimizer.state = states = _StageStates(dict, states)
        states.optimizer, states.model = optimizer, model
    states.changed = True


def show_states(optimizer: Optimizer, numbers: bool = False) -> None:
    """Show the states of an optimizer that sees all stages as its parameters are shown; also plain `numbers`."""
    for parameter, entries in optimizer.state.items():
        if not isinstance(parameter, StageValue) or not isinstance(entries, dict):
            continue
        for key, value in entries.items():
            # a count of steps is the same on every rank
            number = type(value) is torch.Tensor and not value.dim() and not numbers
            if isinstance(value, torch.Tensor) and not number and not isinstance(value, StageValue):
                value = value if parameter.here else meta_like(value)
                entries[key] = staged(value, parameter.whole_model, parameter.holders, parameter.device)


@cache
def reset_where_held() -> None:
    """From now on `zero_grad()` of optimizers and modules resets the gradients of each stage on its ranks, and exchanges nothing.

    Torch's asks each parameter whether it has a gradient, which the ranks of other stages would have to be told: in every step of
    training all stages would wait for each other.
    """
    Optimizer.zero_grad = _where_held(Optimizer.zero_grad, parameters_of)  # type: ignore[method-assign]
    nn.Module.zero_grad = _where_held(nn.Module.zero_grad, nn.Module.parameters)  # type: ignore[method-assign]


def parameters_of(optimizer: Optimizer) -> list[Any]:
    """The parameters of all groups of an optimizer."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def _where_held(
    zero_grad: Callable[..., None], parameters: Callable[[Any], Iterable[Any]]
) -> Callable[..., None]:
    @wraps(zero_grad)
    def run(self: Any, set_to_none: bool = True) -> None:
        given = list(parameters(self))
        model = whole_model_among(given)
        if model is None or model.inside:
            zero_grad(self, set_to_none)
            return
        with model.entered():
            zero_grad(self, set_to_none)
        for parameter in given if set_to_none else ():
            if isinstance(parameter, StageTensor):
                set_held_gradient(parameter, None)

    return run


@contextlib.contextmanager
def own_state(model: nn.Module, optimizer: Optimizer | None) -> Iterator[None]:
    """Inside, `model` and `optimizer` have the parameters, buffers and states of this rank's stages only."""
    with contextlib.nullcontext() if optimizer is None else own_groups(optimizer), own_stages(model):
        yield


@contextlib.contextmanager
def own_groups(optimizer: Optimizer) -> Iterator[None]:
    """`own_state` of an optimizer alone, to enter before that of the model."""
    groups = optimizer.param_groups
    states: Any = optimizer.state
    before = [group["params"] for group in groups]
    of_others: dict[torch.Tensor, Any] = {}
    for parameter, entries in list(states.items()):
        if isinstance(parameter, StageTensor):
            of_others[parameter] = states.pop(parameter)
        elif isinstance(parameter, StageValue):
            entries.update((key, value_of(value)) for key, value in list(entries.items()))
    for group in groups:
        group["params"] = [p for p in group["params"] if not isinstance(p, StageTensor)]
    try:
        yield
    finally:
        for group, parameters in zip(groups, before, strict=True):
            group["params"] = parameters
        states.update(of_others)
        if not steps_each_parameter(optimizer):
            show_states(optimizer)
        elif isinstance(states, _StageStates) and not states.changed:
            # they had been agreed on before
            show_states(optimizer, numbers=True)
