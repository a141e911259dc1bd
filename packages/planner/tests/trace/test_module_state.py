"""Planning restores a model: hooks, counters and replaced layers of its forward, on the one rank that plans."""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

import pytest
import torch
from planner_models import eager
from test_eager_only import facts
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.borrow_model import ModuleState
from meshwright_planner.trace.recorder.record import record

BOOK = RuleBook.first_party()


class Block(nn.Module):
    """A linear layer with something that is worth seeing inside."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(x) * self.gate(x).softmax(-1).sum(-1, keepdim=True)


class WritesDetached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + x.detach().mul_(0.1)
        return self.second(x.relu_()).sum()


def test_a_forward_that_writes_to_a_detached_view_is_recorded() -> None:
    tape = record(WritesDetached(), Batch.of(torch.randn(4, 8)), BOOK.composites)
    assert sum(node.mutates for node in tape.nodes) == 2


class Tracker:
    """Objects other than modules that a model may have as attributes."""

    def __init__(self) -> None:
        self.calls = 0
        self.seen: list[torch.Tensor] = []


class Hooked(nn.Module):
    """Registers hooks in its first forward, and computes a loss from their tensors; counts calls."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.extra = nn.ModuleDict()
        self.tracker = Tracker()
        self.history: dict[str, list[int]] = {"rows": []}
        self.last = deque([0], maxlen=1)
        self._hooked = False
        self._now: list[torch.Tensor] = []

    def _see(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self._now.append(out)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._hooked:
            self._hooked = True
            for block in self.layers:
                block.gate.register_forward_hook(self._see)
        self._now.clear()
        self.tracker.calls += 1
        self.tracker.seen.append(x)
        self.history["rows"].append(len(x))
        self.last.append(len(x))
        for block in self.layers:
            x = block(x)
        self.layers.append(nn.Identity())
        self.extra["more"] = nn.Identity()
        return x.square().mean() + sum(logits.softmax(-1).square().sum() for logits in self._now)


def everything(model: Hooked) -> tuple[Any, ...]:
    hooks = [
        (name, table, list(entries))
        for name, module in model.named_modules()
        for table, entries in vars(module).items()
        if isinstance(entries, OrderedDict) and "hook" in table
    ]
    attributes = [(name, sorted(vars(module))) for name, module in model.named_modules()]
    held = (model.tracker.calls, list(model.tracker.seen), {k: list(v) for k, v in model.history.items()})
    return hooks, attributes, held, list(model.last), model._hooked, list(model._now)


def test_planning_restores_hooks_lists_and_objects() -> None:
    model = Hooked()
    before, layers, rows = everything(model), model.layers, model.history["rows"]
    eager().plan(model, torch.randn(4, 8), PlanRequest(cluster=LAPTOP_CPU, world_size=4))
    assert everything(model) == before and len(model.layers) == 5
    assert model.layers is layers and model.history["rows"] is rows, "other containers than before"
    model(torch.randn(4, 8))
    assert len(model._now) == 5 and model.tracker.calls == 1, "the first real forward registers its own hooks"


def test_user_hooks_stay() -> None:
    model, seen = Hooked(), []
    handle = model.layers[1].register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    record(model, Batch.of(torch.randn(4, 8)), BOOK.composites)
    handle.remove()
    assert seen == [(4, 8)] and not model.layers[1]._forward_hooks


@pytest.mark.parametrize("before", [False, True], ids=["registered in the forward", "registered before"])
def test_hooks_of_copied_blocks_get_their_own_tensors(monkeypatch: pytest.MonkeyPatch, before: bool) -> None:
    model, batch = Hooked(), Batch.of(torch.randn(4, 8))
    if before:
        model(torch.randn(2, 8))
        del model.layers[5]
    short = record(model, batch, BOOK.composites)
    monkeypatch.setattr("meshwright_planner.trace.recorder.record.BlockReplayer", lambda *args: None)
    whole = record(model, batch, BOOK.composites)
    assert (
        set(short.copied) == {"layers.3"} and not whole.copied
    )  # the first one needs no gradient of its input
    assert sum(node.name == "aten._softmax.default" for node in short.nodes) == 10
    assert facts(short) == facts(whole)


@pytest.mark.parametrize("kind", ["computes", "replaces", "with keywords", "before", "unlike"])
def test_blocks_with_active_hooks_are_all_run(kind: str) -> None:
    model, seen = Hooked(), []
    for place, block in enumerate(model.layers):
        if kind == "computes":
            block.gate.register_forward_hook(lambda module, args, out: seen.append(out * 2))
        elif kind == "replaces":
            block.gate.register_forward_hook(lambda module, args, out: out)
        elif kind == "with keywords":
            block.gate.register_forward_hook(lambda module, args, kwargs, out: None, with_kwargs=True)
        elif kind == "before":
            block.gate.register_forward_pre_hook(lambda module, args: None)
        elif place == 3:  # neither the first two nor the last
            block.gate.register_forward_hook(lambda module, args, out: seen.append(out * 2))
    tape = record(model, Batch.of(torch.randn(4, 8)), BOOK.composites)
    assert not tape.copied or (kind == "unlike" and set(tape.copied) == {"layers.2"})


def test_all_blocks_run_when_a_hook_computes_in_a_copy() -> None:
    """The same code in every block, and another thing to do: all is recorded again, with every block run."""
    model, seen = Hooked(), []

    def hang(block: nn.Module, doubles: bool) -> None:
        block.gate.register_forward_hook(lambda module, args, out: seen.append(out * 2) if doubles else None)

    for place, block in enumerate(model.layers):
        hang(block, place == 3)
    tape = record(model, Batch.of(torch.randn(4, 8)), BOOK.composites)
    assert not tape.copied


def test_model_is_restored_when_the_run_raises() -> None:
    model = Hooked()
    before = everything(model)
    with pytest.raises(Exception, match="reduction dim"):
        record(model, Batch.of(torch.randn(4, 7)), BOOK.composites)
    assert everything(model) == before


def test_recursive_container_is_saved_once() -> None:
    module = nn.Linear(2, 2)
    ring: list[Any] = [{1, 2}, (deque([3]), {"a": [4]})]
    ring.append(ring)
    module.ring = ring
    before = ModuleState([module])
    ring[0].add(5)
    ring[1][0].append(6)
    ring[1][1]["a"].clear()
    ring[1][1]["b"] = 7
    ring.reverse()
    module.other = 1
    before.put_back()
    assert ring[2] is ring and not hasattr(module, "other")
    assert ring[:2] == [{1, 2}, (deque([3]), {"a": [4]})]
