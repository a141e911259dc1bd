"""Planning runs the model and nothing else: no graph is captured, and repeated blocks are written down as they would run."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from captures import FIRST, Captured, refused
from planner_models import Transformer, eager, tokens
from torch import nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import RecordingCache, record
from meshwright_planner.trace.scale_batch import TapeFamily
from meshwright_planner.trace.tape import Tape

BOOK = RuleBook.first_party()


@pytest.mark.slow
def test_graph_captures_are_all_detected() -> None:
    x, linear = torch.ones(2), nn.Linear(2, 2)
    ways: dict[str, Callable[[], Any]] = {
        "torch.compile": lambda: torch.compile(linear),
        "dynamo": lambda: torch._dynamo.optimize("eager")(linear),
        "export": lambda: torch.export.export(linear, (x,)),
        "fx": lambda: torch.fx.symbolic_trace(linear),
        "tracer": lambda: torch.fx.Tracer().trace(linear),
        "make_fx": lambda: torch.fx.experimental.proxy_tensor.make_fx(linear)(x),
        "aot": lambda: torch._functorch.aot_autograd.aot_function(linear, lambda g, _: g)(x),
        "trace": lambda: torch.jit.trace(linear, x),
        "script": lambda: torch.jit.script(linear),
        "graph": lambda: torch.fx.Graph(),
    }
    with refused() as captured:
        assert set(FIRST) <= set(captured) and len(captured) > 60
        for name, way in ways.items():
            with pytest.raises(Captured):
                way()
                raise AssertionError(f"{name} did not raise")
    assert torch.fx.symbolic_trace(linear)(x).shape == (2,)  # all is as it was


MODELS = {
    "transformer": lambda: (Transformer(layers=4), tokens(rows=4)),
    "experts": lambda: (Experts(), torch.randn(4, 16)),
    "convolutions": lambda: (
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 8)),
        torch.randn(4, 3, 8, 8),
    ),
    "looking at data": lambda: (Looks(), torch.randn(4, 16)),
}


@pytest.mark.parametrize("name", MODELS)
def test_no_graph_is_captured(name: str) -> None:
    model, batch = MODELS[name]()
    with refused():
        for pins in ({}, {"tp": 2}):
            request = PlanRequest(cluster=LAPTOP_CPU, world_size=4, top_k=2, **pins)  # type: ignore[arg-type]
            for plan in eager().plan(model, batch, request):
                assert plan.world_size == 4


class Experts(nn.Module):
    """Two experts, each row to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(16, 2)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = self.gate(x).softmax(-1)
        return sum(expert(x) * share[:, i : i + 1] for i, expert in enumerate(self.experts)).sum()  # type: ignore[union-attr]


class Looks(nn.Module):
    """Takes another path when its activations are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (self.second(hidden) if hidden.mean() < 100 else hidden).sum()


def test_data_dependent_model_runs_on_real_data() -> None:
    tape = record(Looks(), Batch.of(torch.randn(4, 16)), BOOK.composites)
    assert tape.real and sum(n.name == "linear" for n in tape.nodes) == 2


class Saves(Looks):
    """Functions whose own results are saved for the backward pass, in a checkpoint too."""

    reentrant: bool | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x.tanh()
        inner = (
            inner if self.reentrant is None else checkpoint(torch.exp, inner, use_reentrant=self.reentrant)
        )
        return super().forward(inner).exp()


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_recording_on_real_data_leaves_no_tensor(reentrant: bool | None) -> None:
    model, batch = Saves(), Batch.of(torch.randn(4, 16, requires_grad=True))
    model.reentrant = reentrant

    def alive() -> dict[int, torch.Tensor]:
        gc.collect()
        return {id(item): item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)}

    before = alive()
    assert record(model, batch, BOOK.composites).real
    assert [tensor.shape for key, tensor in alive().items() if key not in before] == []


def facts(tape: Tape) -> tuple[Any, ...]:
    """All there is to say of a tape, whatever its values are numbered."""
    shapes = [v.shape for v in tape.values]
    nodes = [
        (n.name, n.module, n.call, [shapes[r.i] for r in n.ins], [shapes[r.i] for r in n.outs], n.flops)
        for n in tape.nodes
    ]
    named = [[tape.values[r.i].name for r in n.ins] for n in tape.nodes]
    saved = Counter(
        (s.node, s.output, s.nbytes, None if s.root is None else shapes[s.root]) for s in tape.saved
    )
    return nodes, named, saved, tape.activation_bytes


def test_copied_blocks_equal_run_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Transformer(layers=6), Batch.of(tokens())
    ran: list[str] = []
    short = record(model, batch, BOOK.composites)
    monkeypatch.setattr(
        "meshwright_planner.trace.recorder.record.BlockReplayer",
        lambda model, watcher, trusted: ran.append("all"),
    )
    whole = record(model, batch, BOOK.composites)
    assert ran == ["all"] and set(short.copied) == {f"layers.{i}" for i in (2, 3, 4)}
    assert not whole.copied and facts(short) == facts(whole)


def test_verified_blocks_run_once_in_other_sizes() -> None:
    model, cache = Transformer(layers=6), RecordingCache()
    record(model, Batch.of(tokens(rows=2)), BOOK.composites, cache=cache)
    assert cache.trusted == {"layers.0"}
    again = record(model, Batch.of(tokens(rows=4)), BOOK.composites, cache=cache)
    assert set(again.copied) == {f"layers.{i}" for i in (1, 2, 3, 4, 5)}
    assert facts(again) == facts(record(model, Batch.of(tokens(rows=4)), BOOK.composites))


def test_different_block_is_run() -> None:
    """The last of a family does more than its attributes tell: everything is run."""

    class Block(nn.Module):
        def __init__(self, idx: int) -> None:
            super().__init__()
            self.layer_idx, self.a, self.b = idx, nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            return self.b(x) if self.layer_idx < 5 else self.b(x).tanh()

    model = nn.Sequential(*(Block(i) for i in range(6)))
    cache = RecordingCache()
    tape = record(model, Batch.of(torch.randn(4, 8)), BOOK.composites, cache=cache)
    assert not cache.trusted
    assert not tape.copied and sum(n.name == "aten.tanh.default" for n in tape.nodes) == 1


def test_scaled_tape_equals_recorded_tape() -> None:
    model = Transformer(layers=2)

    def tape(rows: int) -> Tape:
        return record(model, Batch.of(tokens(rows=rows)), BOOK.composites)

    family = TapeFamily(tape(2), tape(4))
    scaled = family.at(16)
    assert scaled is not None and scaled.rows == 16
    assert facts(scaled) == facts(tape(16)) and facts(scaled) != facts(tape(8))
