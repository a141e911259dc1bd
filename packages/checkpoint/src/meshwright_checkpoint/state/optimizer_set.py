"""Several optimizers of one model, of which a checkpoint has the groups and states as if they were those of one."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.stages import optimizers as stages


class OptimizerSet:
    """Optimizers, each of its own parameters.

    Attributes:
        optimizers: in the order that was given.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises UsageError: there is none, something is no optimizer, or a parameter is in two of them."""
        self.optimizers = tuple(optimizers)
        wrong = next((x for x in self.optimizers if not isinstance(x, Optimizer)), None)
        if not self.optimizers or wrong is not None:
            kind = "nothing" if wrong is None else f"a {type(wrong).__name__}"
            raise UsageError(
                f"optimizer= has {kind} among its optimizers; give one optimizer, or a list of them"
            )
        seen: dict[int, int] = {}
        for number, optimizer in enumerate(self.optimizers):
            for parameter in stages.parameters_of(optimizer):
                first = seen.setdefault(id(parameter), number)
                if first != number:
                    raise UsageError(
                        f"optimizers {first} and {number} of optimizer= have a parameter of shape {list(parameter.shape)} in "
                        "common; a checkpoint has one state of each parameter"
                    )
        self._states = _States(self.optimizers)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all of them."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, Any]:
        """The states of all of them; what is written goes to the optimizer of its parameter."""
        return self._states


AnyOptimizer = Optimizer | OptimizerSet | None


def as_one(optimizer: Optimizer | Sequence[Optimizer] | OptimizerSet | None) -> AnyOptimizer:
    """An optimizer, or a set of those of a list."""
    return OptimizerSet(optimizer) if isinstance(optimizer, (list, tuple)) else optimizer  # type: ignore[return-value]


def parts(optimizer: AnyOptimizer) -> tuple[Optimizer, ...]:
    """The optimizers of a set; one; none."""
    if isinstance(optimizer, OptimizerSet):
        return optimizer.optimizers
    return () if optimizer is None else (optimizer,)


def class_name(optimizer: AnyOptimizer) -> str:
    """As a checkpoint has it."""
    return " and ".join(type(each).__qualname__ for each in parts(optimizer))


@contextmanager
def own_state(model: nn.Module, optimizer: AnyOptimizer) -> Iterator[None]:
    """Inside, `model` and `optimizer` have the parameters, buffers and states of this rank's stages only."""
    first, *others = parts(optimizer) or (None,)
    with ExitStack() as stack:
        for each in others:
            stack.enter_context(stages.own_groups(each))
        stack.enter_context(stages.own_state(model, first))
        yield


class _States(MutableMapping[torch.Tensor, Any]):
    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        # id -> the parameter, which has this id as long as it is here, and its optimizer
        self._owners: dict[int, tuple[torch.Tensor, Optimizer]] = {}

    def _of(self, parameter: torch.Tensor) -> MutableMapping[torch.Tensor, Any]:
        if id(parameter) not in self._owners:
            self._owners = {
                id(mine): (mine, optimizer)
                for optimizer in self._optimizers
                for mine in stages.parameters_of(optimizer)
            }
        _, optimizer = self._owners[id(parameter)]
        return optimizer.state

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        states = self._of(parameter)
        # not of a defaultdict, which would make one
        if parameter not in states:
            raise KeyError(parameter)
        return states[parameter]

    def __setitem__(self, parameter: torch.Tensor, entries: Any) -> None:
        self._of(parameter)[parameter] = entries

    def __delitem__(self, parameter: torch.Tensor) -> None:
        del self._of(parameter)[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(optimizer.state for optimizer in self._optimizers)

    def __len__(self) -> int:
        return sum(len(optimizer.state) for optimizer in self._optimizers)
