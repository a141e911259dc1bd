"""What a recording knows of who calls which module, and what follows for recomputation and for the work of modules."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from meshwright_dtensor.model.blocks import repeated_blocks
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.recompute.region import recomputed_blocks
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Tape


class Block(nn.Module):
    """Two linear layers, in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(4, 8), nn.Linear(8, 4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.parts
        made: torch.Tensor = second(torch.relu(first(x)))
        return made


class Model(nn.Module):
    """Layers that are dicts, or blocks that are called whole (`whole`), or not (their parts are)."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        make = (lambda: nn.ModuleDict({"n": nn.LayerNorm(4), "b": Block()})) if kind == "dicts" else Block
        self.layers = nn.ModuleList(make() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.kind == "dicts":
                x = x + layer["b"](layer["n"](x))
            elif self.kind == "whole":
                x = x + layer(x)
            else:
                x = x + layer.parts[1](layer.parts[0](x))
        return x.square().mean()


def recorded(kind: str) -> Tape:
    """The tape of a model."""
    return record(Model(kind), Batch.of({"x": torch.randn(2, 4)}), RuleBook.first_party().composites)


@pytest.mark.parametrize("kind", ["dicts", "whole", "parts"])
def test_calls_inside_copied_blocks_are_recorded(kind: str) -> None:
    inside = {"dicts": ".b.parts", "whole": ".parts", "parts": ".parts"}[kind]
    within = {"dicts": ".b", "whole": "", "parts": None}[kind]
    expected = set()
    for i in range(5):
        layer = f"layers.{i}"
        caller = "" if within is None else f"{layer}{within}"
        expected |= {(caller, f"{layer}{inside}.{part}") for part in range(2)}
        expected |= {"dicts": {("", f"{layer}.n"), ("", f"{layer}.b")}, "whole": {("", layer)}}.get(
            kind, set()
        )
    assert recorded(kind).calls == expected


@pytest.mark.parametrize(
    ("kind", "static", "expected"),
    [
        ("dicts", "layers.*.*", "layers.*.*"),
        ("whole", "layers.*", "layers.*"),
        ("parts", "layers.*", "layers.*.*"),
    ],
)
def test_repeated_blocks_follow_module_calls(kind: str, static: str, expected: str) -> None:
    tape = recorded(kind)
    assert repeated_blocks(Model(kind)) == (static,)
    assert repeated_blocks(Model(kind), tape.calls) == (expected,)
    recomputed = recomputed_blocks(tape, [RecomputeRule(pattern="layers.*")])
    last = {"dicts": {"layers.4.n", "layers.4.b"}, "whole": {"layers.4"}, "parts": set()}[kind]
    assert {name for name in recomputed if name.startswith("layers.4")} == last


def test_returned_values_and_scalars_are_recorded() -> None:
    tape = recorded("whole")
    assert tape.returned == tuple(tape.results)


class Repeated(nn.Module):
    """Blocks that call one activation twice each, all of them run twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TwoCalls() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in [*self.layers, *self.layers]:
            x = layer(x)
        return x.square().mean()


class TwoCalls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.line = nn.Tanh(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # a module without a name: its calls are those of the block
        made: torch.Tensor = nn.Tanh()(self.act(self.line(self.act(x))))
        return made.tanh()


def test_forwards_of_a_module_are_numbered_in_copied_blocks_too() -> None:
    tape = record(Repeated(), Batch.of({"x": torch.randn(2, 4)}), RuleBook.first_party().composites)
    calls = [node.call for node in tape.nodes if node.call is not None and node.call.function == "tanh"]
    expected = []
    for again in range(2):
        for layer in range(5):
            expected += [(f"layers.{layer}.act", 0, 2 * again + place) for place in range(2)]
            expected += [(f"layers.{layer}", place, again) for place in range(2)]
    assert [(call.module, call.occurrence, call.forward) for call in calls] == expected
    assert tape.copied
