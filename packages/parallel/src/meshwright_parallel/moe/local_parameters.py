"""Replace the forward of a module of experts, and run it on plain local tensors in place of its parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
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


class SwappedParameters:
    """Tensors in place of the parameters of a module tree, until `undo`."""

    def __init__(self) -> None:
        self._parameters: list[tuple[nn.Module, str, nn.Parameter]] = []

    def swap(self, root: nn.Module, value: Callable[[MeshParameter], Tensor]) -> list[Tensor]:
        """Replace each parameter by `value(parameter)`; returns the new tensors."""
        values: dict[int, Tensor] = {}
        for module in root.modules():
            for name, parameter in module._parameters.items():
                if isinstance(parameter, MeshParameter):
                    if id(parameter) not in values:
                        values[id(parameter)] = value(parameter)
                    self._parameters.append((module, name, parameter))
                    module._parameters[name] = cast(Any, values[id(parameter)])
        return list(values.values())

    def undo(self) -> None:
        """Put the parameters back."""
        for module, name, parameter in self._parameters:
            module._parameters[name] = parameter
        self._parameters.clear()


@dataclass
class LocalExperts:
    """Context: the module runs on this rank's experts.

    Args:
        rank, ranks: coordinate on the expert axis, and its size.
        rows: state of the tokens on each mesh axis; X where ranks have the same tokens but parts of every expert.
        axis: the expert axis.
        idle: of a container, the numbers of the experts that have rows on other ranks only.

    Attributes:
        trained: whether any parameter of the module is trained.
    """

    module: nn.Module
    rule: ExpertsRule
    rank: int
    ranks: int
    rows: States
    axis: str
    idle: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.trained = any(p.requires_grad for p in self.module.parameters())
        self._swapped = SwappedParameters()
        self._attributes: list[tuple[nn.Module, str, int]] = []

    def __enter__(self) -> list[Tensor]:
        """Returns the local tensors that get a gradient even where this rank has no token.

        Of fused experts: all, as on one device. Of a container: those of the idle experts, so that all ranks agree on which
        gradients are None.
        """
        tensors = self._swapped.swap(self.module, self._local)
        if self.rule.kind == "container":
            idle = [self.module.get_submodule(self.rule.children[e]) for e in self.idle]
            return [p for child in idle for p in child.parameters()]
        for path in self.rule.attributes:
            owner, _, name = path.rpartition(".")
            module = self.module.get_submodule(owner)
            self._attributes.append((module, name, getattr(module, name)))
            setattr(module, name, self.rule.count // self.ranks)
        return tensors

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._swapped.undo()
        for module, name, value in self._attributes:
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
