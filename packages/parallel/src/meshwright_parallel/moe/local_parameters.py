"""Replace the forward of a module of experts, and run it on plain local tensors in place of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from meshwright_dtensor.parameter import MeshParameter, layout_of_dtensor, parameter_local
from meshwright_dtensor.plan import ExpertsRule
from meshwright_dtensor.sharding.states import State, States, is_shard

Tensor = torch.Tensor


@dataclass
class ExpertsForward:
    """A replacement of the forward `inner` of a module of experts; `name` is fully qualified."""

    module: nn.Module
    name: str
    rule: ExpertsRule
    inner: Callable[..., Any]

    def __post_init__(self) -> None:
        self.__signature__ = inspect.signature(self.inner)
        self._names = list(self.__signature__.parameters)[:3]


@contextmanager
def swapped_parameters(root: nn.Module, value: Callable[[MeshParameter], Tensor]) -> Iterator[list[Tensor]]:
    """`value(parameter)` in place of each parameter of a module tree; yields the new tensors."""
    values: dict[int, Tensor] = {}
    originals: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, MeshParameter):
                    if id(parameter) not in values:
                        values[id(parameter)] = value(parameter)
                    originals.append((module, name, parameter))
                    module._parameters[name] = cast(Any, values[id(parameter)])
        yield list(values.values())
    finally:
        for module, name, parameter in originals:
            module._parameters[name] = parameter


@dataclass
class LocalExperts:
    """The module, run on this rank's experts.

    Args:
        rank, ranks: coordinate on the expert axis, and its size.
        rows: state of the tokens on each mesh axis; X where ranks have the same tokens but parts of every expert.
        axis: the expert axis.
        idle: of a container, the numbers of the experts that have rows on other ranks only.
    """

    module: nn.Module
    rule: ExpertsRule
    rank: int
    ranks: int
    rows: States
    axis: str
    idle: Sequence[int] = ()

    @contextmanager
    def swapped(self) -> Iterator[list[Tensor]]:
        """Yields the local tensors that get a gradient even where this rank has no token.

        Of fused experts: all, as on one device. Of a container: those of the idle experts, so that all ranks agree on which
        gradients are None.
        """
        attributes: list[tuple[nn.Module, str, int]] = []
        with swapped_parameters(self.module, self._local) as tensors:
            paths = self.rule.attributes
            if self.rule.kind == "container":
                idle = [self.module.get_submodule(self.rule.children[e]) for e in self.idle]
                tensors, paths = [p for child in idle for p in child.parameters()], ()
            try:
                for path in paths:
                    owner, _, name = path.rpartition(".")
                    module = self.module.get_submodule(owner)
                    attributes.append((module, name, getattr(module, name)))
                    setattr(module, name, self.rule.count // self.ranks)
                yield tensors
            finally:
                for module, name, value in attributes:
                    setattr(module, name, value)

    def assignment(self, expert: Tensor, like: Tensor) -> Tensor:
        """The module's assignment for rows of the local experts `expert` [R], in the form of `like`."""
        count = self.rule.count
        if self.rule.kind == "fused":
            count //= self.ranks
        else:
            # children keep their global numbers
            expert = expert + self.rank * (count // self.ranks)
        if self.rule.assignment == "mask":
            expert, like = nn.functional.one_hot(expert, count), like[..., 0]
            return expert.to(like.dtype).view(-1, *(1,) * (like.ndim - 1), count)
        return expert.to(like.dtype).view(-1, *(1,) * (like.ndim - 1))

    def _local(self, parameter: MeshParameter) -> Tensor:
        """The local tensor, whose gradient is partial only where ranks have different rows.

        Where ranks have parts of every expert, a parameter that is not sharded counts once, on the first rank.
        """
        layout = layout_of_dtensor(parameter)
        states: list[State] = []
        for axis, state, row in zip(layout.context.axes, layout.states, self.rows, strict=True):
            if axis == self.axis or is_shard(state):
                states.append(state)
            elif row == "X":
                states.append("P")
            else:
                states.append(state if is_shard(row) else "I")
        return parameter_local(parameter, tuple(states))
