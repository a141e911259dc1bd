"""Models that write to tensors which several layers, or a layer and the model around it, hold; or nobody (a global one)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

WIDTH, ROWS = 8, 8

EVERYWHERE = torch.zeros(WIDTH)
"""A global tensor that forwards write to."""

Hold = Callable[[nn.Module], None]
Write = Callable[[Any, Tensor], None]
Read = Callable[[Any], Tensor | float]


class Cell:
    """Holds a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


# ---- how modules hold one tensor: each call makes another tensor


def registered() -> Hold:
    """A buffer."""
    value = torch.zeros(WIDTH)
    return lambda module: module.register_buffer("value", value)


def part_of_a_buffer() -> Hold:
    """A view of a larger tensor, another one in each module."""
    value = torch.zeros(2 * WIDTH)
    return lambda module: module.register_buffer("value", value[WIDTH:])


def trained() -> Hold:
    """A parameter."""
    value = nn.Parameter(torch.zeros(WIDTH))
    return lambda module: module.register_parameter("value", value)


def attribute() -> Hold:
    """An attribute that is no buffer."""
    value = torch.zeros(WIDTH)
    return lambda module: setattr(module, "value", value)


def in_an_object() -> Hold:
    """An object with a tensor."""
    held = Cell(torch.zeros(WIDTH))
    return lambda module: setattr(module, "held", held)


def in_a_list() -> Hold:
    """A list with a tensor."""
    held = [torch.zeros(WIDTH)]
    return lambda module: setattr(module, "held", held)


def by_nobody() -> Hold:
    """A global tensor."""
    EVERYWHERE.zero_()
    return lambda module: None


def value_of(module: Any) -> Tensor:
    """The tensor that a module holds."""
    if "held" not in module.__dict__:
        return getattr(module, "value", EVERYWHERE)
    return module.held.value if isinstance(module.held, Cell) else module.held[0]


# ---- what they do with it


def copied(module: Any, x: Tensor) -> None:
    """Overwrite it."""
    with torch.no_grad():
        value_of(module).copy_(x.mean(0))


def added(module: Any, x: Tensor) -> None:
    """Add to it in a way that autograd does not see."""
    value_of(module).data.add_(x.detach().mean(0))


def assigned(module: Any, x: Tensor) -> None:
    """Put another tensor in its place."""
    value = x.detach().mean(0)
    if "held" not in module.__dict__:
        module.value = value
    elif isinstance(module.held, Cell):
        module.held.value = value
    else:
        module.held[0] = value


def nothing(module: Any, x: Tensor) -> None:
    """Leave it alone."""


def read(module: Any) -> Tensor:
    """Its value."""
    return value_of(module).clone()


def zero(module: Any) -> float:
    """Nothing of it."""
    return 0.0


class Layer(nn.Module):
    """Adds to its result the tensor that it reads, and then writes there."""

    def __init__(self, hold: Hold, write: Write, read: Read) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        hold(self)
        self.write, self.read = write, read

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) + self.read(self)
        self.write(self, y)
        return y


class Layers(nn.Module):
    """Four layers. The first writes to a tensor that all hold, and all read it."""

    def __init__(self, hold: Hold, write: Write, read: Read = read) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(hold, each, read) for each in (write, nothing, nothing, nothing))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": x.square().mean()}


class Around(Layers):
    """The model reads what the first layer writes."""

    def __init__(self, hold: Hold, write: Write) -> None:
        super().__init__(hold, write, zero)
        hold(self)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        return {"loss": (x + read(self)).square().mean()}


class Carried(nn.Module):
    """The model reads what its forward before has written."""

    def __init__(self, hold: Hold, write: Write) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        hold(self)
        self.write = write

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = x + read(self)
        for layer in self.layers:
            x = layer(x)
        self.write(self, x)
        return {"loss": x.square().mean()}


class Between(nn.Module):
    """The last layer reads what the model writes after the first one."""

    def __init__(self, hold: Hold, write: Write) -> None:
        super().__init__()
        reads = (zero, zero, zero, read)
        self.layers = nn.ModuleList(Layer(hold, nothing, each) for each in reads)
        hold(self)
        self.write = write

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for place, layer in enumerate(self.layers):
            x = layer(x / 2 + 1)
            if not place:
                self.write(self, x)
        return {"loss": x.square().mean()}


class Keeping(nn.Module):
    """Layers and model keep results in attributes, for whoever reads them after the step; a layer also its own from before."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(attribute(), assigned, read) for _ in range(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = layer(x)
        loss = x.square().mean()
        self.last = loss.detach()
        return {"loss": loss}


KEPT: dict[str, Callable[[Any], Tensor]] = {
    "value of the first layer": lambda model: value_of(model.layers[0]),
    "value of the last layer": lambda model: value_of(model.layers[3]),
    "last": lambda model: model.last,
}

Make = Callable[[], nn.Module]
_HOLDS = (registered, part_of_a_buffer, trained, attribute, in_an_object, in_a_list)
_ASSIGNABLE = (attribute, in_an_object, in_a_list)


def _own(hold: Callable[[], Hold]) -> Make:
    """Each layer has a tensor of its own."""
    return lambda: Layers(lambda module: hold()(module), added)


def _made(
    kind: Callable[[Hold, Write], nn.Module], holds: Iterable[Callable[[], Hold]], *writes: Write
) -> dict[str, Make]:
    return {
        f"{kind.__name__} {hold.__name__} {write.__name__}": partial(_make, kind, hold, write)
        for hold in holds
        for write in writes
    }


def _make(kind: Callable[[Hold, Write], nn.Module], hold: Callable[[], Hold], write: Write) -> nn.Module:
    return kind(hold(), write)


RUN: dict[str, Make] = {
    **{f"own {hold.__name__}": _own(hold) for hold in _HOLDS},
    **_made(Carried, [registered], copied, added, assigned),
    **_made(Between, [attribute], copied),
    **_made(Between, [in_an_object, in_a_list], copied, assigned),
}
"""Equal to one device with one microbatch."""

_REFUSED: dict[str, dict[str, Make]] = {
    "several stages hold it": _made(Layers, _HOLDS, copied, added),
    "the model around it holds it too": _made(Around, _HOLDS, copied),
    "from one forward to the next": _made(Carried, _ASSIGNABLE, copied, added, assigned),
    "writes to its 'value' between": _made(Between, [registered], copied, added),
    "a tensor that no module holds": {
        name: make
        for kind in (Layers, Carried, Between)
        for name, make in _made(kind, [by_nobody], copied, added).items()
    },
}
REFUSED = {name: (make, says) for says, made in _REFUSED.items() for name, make in made.items()}
"""Refused, and what the refusal says."""
