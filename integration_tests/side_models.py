"""Models whose layers pass tensors in objects and attributes, not in return values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS = 8, 8


@dataclass(frozen=True)
class State:
    """What goes from layer to layer."""

    x: Tensor
    skipped: tuple[Tensor, ...] = ()
    name: str = ""


class Opaque:
    """Holds a tensor where nobody would look for one."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


class Layer(nn.Module):
    """Takes a tensor or an object with one, and returns what `wrap` makes of its result."""

    def __init__(self, wrap: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(WIDTH, WIDTH), wrap

    def forward(self, given: Any) -> Any:
        return self.wrap(torch.tanh(self.linear(given.x)))


class Wrapped(nn.Module):
    """Layers that are given objects, and return some or tensors (`wrap`), which `again` makes objects of."""

    def __init__(self, wrap: Callable[[Tensor], Any], again: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(wrap) for _ in range(4))
        self.again = again

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        state = State(x)
        for layer in self.layers:
            state = self.again(layer(state))
        return {"loss": state.x.square().mean()}


def as_it_is(value: Any) -> Any:
    """The value."""
    return value


def state_of(x: Tensor) -> State:
    """A frozen dataclass, with a tensor in a tuple in it."""
    return State(x, (x.square(),), "made")


def summed(state: State) -> State:
    """Takes both tensors."""
    return State(state.x + state.skipped[0], (), state.name)


class Leaving(nn.Module):
    """Leaves `what` it is told of its result in an attribute."""

    def __init__(self, leave: Callable[[Any, Tensor], None], first: Any) -> None:
        super().__init__()
        self.linear, self.leave = nn.Linear(WIDTH, WIDTH), leave
        if first is not None:
            self.left = first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.leave(self, y)
        return y


class Left(nn.Module):
    """Takes what its layers have left when all have run."""

    def __init__(self, leave: Callable[[Any, Tensor], None], first: Callable[[], Any] = lambda: None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(Leaving(leave, first())) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        for layer in self.layers:
            left = layer[0].left  # type: ignore[index]
            for value in left if isinstance(left, (list, tuple)) else [left]:
                loss = loss + value.mean()
        return {"loss": loss}


def sets(layer: Any, y: Tensor) -> None:
    """A tensor, anew in each forward."""
    layer.left = y.square()


def sets_several(layer: Any, y: Tensor) -> None:
    """A list, anew in each forward."""
    layer.left = [y.square(), y.exp()]


def sets_a_number(layer: Any, y: Tensor) -> None:
    """A number of all rows."""
    layer.left = y.square().mean()


def adds(layer: Any, y: Tensor) -> None:
    """Adds to a list that stays."""
    layer.left.append(y.square())


def zero() -> Tensor:
    """A number."""
    return torch.zeros(())


def nothing() -> list[Tensor]:
    """An empty list."""
    return []


RUN: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "namespaces": lambda: Wrapped(lambda x: SimpleNamespace(x=x, other=None), as_it_is),
        "dataclasses": lambda: Wrapped(state_of, summed),
        "made objects": lambda: Wrapped(as_it_is, Opaque),
        "attributes": lambda: Left(sets),
        "attributes with a first value": lambda: Left(sets, zero),
        "lists in attributes": lambda: Left(sets_several),
    }
)
"""Those that run as pipelines."""

REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = MappingProxyType(
    {
        "opaque objects": (lambda: Wrapped(Opaque, as_it_is), "returns a Opaque that holds tensors"),
        "lists that grow": (lambda: Left(adds, nothing), "adds tensors to its 'left' in its forward"),
    }
)
"""Models that the first step refuses, and the error."""


def numbers() -> dict[str, Tensor]:
    """A batch."""
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))}
