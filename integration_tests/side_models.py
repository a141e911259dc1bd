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


class Measured(nn.Module):
    """Its layers store a plain value in an attribute, or put it into a dict that they are given; code outside scales by it."""

    def __init__(
        self, make: Callable[[Any, Tensor], Any], size: Callable[[Any], float], given: bool = False
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Measures(make) for _ in range(4))
        self.size, self.given = size, given

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        put: dict[str, Any] = {}
        for layer in self.layers:
            x = layer(x, put if self.given else None)
        first: Any = self.layers[0]
        return {"loss": x.square().mean() * self.size(put["made"] if self.given else first.made)}


class Measures(nn.Module):
    """Keeps what `make` makes."""

    def __init__(self, make: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make, self.made = nn.Linear(WIDTH, WIDTH), make, None

    def forward(self, x: Tensor, put: dict[str, Any] | None) -> Tensor:
        if put is None:
            self.made = self.make(self, x)
        elif not put:
            put["made"] = self.make(self, x)
        return torch.tanh(self.linear(x))


class Switching(nn.Module):
    """Code between its modules, or one of them, writes to a plain attribute of the model that it starts with."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.seen: dict[str, list[str]] = {"words": ["a"]}
        here = [self.seen] if inside else []
        words = {"words": ["a"]} if inside else self.seen
        self.layers = nn.ModuleList(Switches([*here], words) for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x * len(self.seen["words"])
        for layer in self.layers:
            x = layer(x)
        if not self.layers[0].here:
            self.seen["words"].append("b")
        return {"loss": x.square().mean()}


class Switches(nn.Module):
    """Adds to a list that is in a dict of the model."""

    def __init__(self, here: list[dict[str, list[str]]], seen: dict[str, list[str]]) -> None:
        super().__init__()
        self.linear, self.here, self.words = nn.Linear(WIDTH, WIDTH), here, seen["words"]

    def forward(self, x: Tensor) -> Tensor:
        for seen in self.here:
            seen["words"].append("c")
        return torch.tanh(self.linear(x)) * len(self.words)


class Common(nn.Module):
    """The first layer leaves something of its values in an object, and the last layer or the model takes it there."""

    def __init__(
        self, keep: Callable[[Any, Tensor], None], take: Callable[[Any], Any], made: Any, last: bool
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Keeps(keep, take, made, place, last) for place in range(4))
        self.take = None if last else lambda: take(made)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        return {"loss": loss + self.take().mean() if self.take is not None else loss}


class Keeps(nn.Module):
    """Keeps where it is the first, and takes where it is the last, if layers take at all."""

    def __init__(self, keep: Any, take: Any, made: Any, place: int, last: bool) -> None:
        super().__init__()
        self.linear, self.keep, self.take, self.made = nn.Linear(WIDTH, WIDTH), keep, take, made
        self.first, self.last = place == 0, place == 3 and last

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.first:
            self.keep(self.made, y)
        return y * self.take(self.made) if self.last else y


class Scale(nn.Module):
    """A module without parameters that all layers have: what the first one stores in it, the others take."""

    def __init__(self, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        self.store, self.number, self.row = store, 1.0, torch.ones(WIDTH)


class Scales(nn.Module):
    """Of a shared Scale."""

    def __init__(self, scale: Scale, first: bool) -> None:
        super().__init__()
        self.linear, self.scale, self.first = nn.Linear(WIDTH, WIDTH), scale, first

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        if self.first:
            self.scale.store(self.scale, y)
        return y * self.scale.number * self.scale.row


class Scaled(nn.Module):
    """Layers with a shared Scale."""

    def __init__(self, store: Callable[[Any, Tensor], None]) -> None:
        super().__init__()
        scale = Scale(store)
        self.layers = nn.ModuleList(Scales(scale, place == 0) for place in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


def stores_a_row(scale: Any, y: Tensor) -> None:
    """A tensor."""
    scale.row = y[:, :1].square()


def stores_a_number(scale: Any, y: Tensor) -> None:
    """A number."""
    scale.number = 2.0


class Table:
    """A class that everybody sees."""

    held: list[Tensor]


def holds(made: Any, y: Tensor) -> None:
    """In the class."""
    Table.held = [y.square()]


def counts(made: Any, y: Tensor) -> None:
    """A number."""
    made["number"] = 2.0


def appended(layer: Any, x: Tensor) -> list[int]:
    """One more in each forward."""
    return [*(layer.made or ()), 1]


RUN: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "namespaces": lambda: Wrapped(lambda x: SimpleNamespace(x=x, other=None), as_it_is),
        "dataclasses": lambda: Wrapped(state_of, summed),
        "made objects": lambda: Wrapped(as_it_is, Opaque),
        "attributes": lambda: Left(sets),
        "attributes with a first value": lambda: Left(sets, zero),
        "lists in attributes": lambda: Left(sets_several),
        "numbers in attributes": lambda: Measured(lambda layer, x: 3.0, float),
        "sizes in attributes": lambda: Measured(lambda layer, x: x.shape[1:], torch.Size.numel),
        "dicts in attributes": lambda: Measured(
            lambda layer, x: {"all": [2, "b"]}, lambda made: made["all"][0]
        ),
        "tensors in shared modules": lambda: Scaled(stores_a_row),
        "sizes that are put": lambda: Measured(lambda layer, x: x.shape[1:], torch.Size.numel, given=True),
        "slices that are put": lambda: Measured(
            lambda layer, x: slice(3), lambda made: made.stop, given=True
        ),
    }
)
"""Those that run as pipelines."""

REFUSED: Mapping[str, tuple[Callable[[], nn.Module], str]] = MappingProxyType(
    {
        "attributes of the model": (
            lambda: Switching(inside=True),
            "module 'layers.0' writes to 'seen' of the model in its forward",
        ),
        "classes, taken by a layer": (
            lambda: Common(holds, lambda made: Table.held[0], None, last=True),
            "and module 'layers.3' reads it there",
        ),
        "classes, taken by the model": (
            lambda: Common(holds, lambda made: Table.held[0], None, last=False),
            "and code outside of it reads it there",
        ),
        "numbers in shared modules": (
            lambda: Scaled(stores_a_number),
            "module 'layers.0.scale' stores 'number' in its forward, and module 'layers.1', which holds it too, reads it",
        ),
        "functions in attributes": (
            lambda: Measured(lambda layer, x: lambda: float(x.shape[1]), lambda made: made()),
            "stores function 'made' in its forward, and code outside of it reads it",
        ),
        "dicts of several layers": (
            lambda: Common(counts, lambda made: made.get("number", 1.0), {}, last=True),
            "module 'layers.0' writes to 'layers.0.made', which modules share, in its forward",
        ),
        "any object in attributes": (
            lambda: Measured(lambda layer, x: Opaque(x.shape), lambda made: made.x[1]),
            "stores Opaque 'made' in its forward, and code outside of it reads it",
        ),
        "any object that is put": (
            lambda: Measured(lambda layer, x: Opaque(x.shape), lambda made: made.x[1], given=True),
            "puts a Opaque into a list, dict or object",
        ),
        "opaque objects": (lambda: Wrapped(Opaque, as_it_is), "returns a Opaque that holds tensors"),
        "lists that grow": (lambda: Left(adds, nothing), "adds tensors to its 'left' in its forward"),
    }
)
"""Models that the first step refuses, and the error."""


def numbers() -> dict[str, Tensor]:
    """A batch."""
    return {"x": torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3))}
