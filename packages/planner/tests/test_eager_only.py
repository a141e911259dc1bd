"""Planning runs the model and nothing else: no graph is captured, and repeated blocks are written down as they would run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from planner_models import Transformer, eager, tokens
from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.machines.known import LAPTOP_CPU
from meshwright_planner.profile.batch import Batch
from meshwright_planner.profile.recording import Known, record
from meshwright_planner.profile.scaling import Family
from meshwright_planner.profile.tape import Tape

BOOK = RuleBook.first_party()

CAPTURES = (
    "torch.fx.symbolic_trace",
    "torch.fx.Tracer.trace",
    "torch.fx.experimental.proxy_tensor.make_fx",
    "torch.compile",
    "torch._dynamo.optimize",
    "torch._dynamo.export",
    "torch._dynamo.convert_frame.convert_frame_assert",
    "torch.export.export",
    "torch.jit.trace",
    "torch.jit.script",
)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a graph was captured")


def test_no_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo
    import torch._dynamo.convert_frame
    import torch.export
    import torch.fx.experimental.proxy_tensor

    for name in CAPTURES:
        monkeypatch.setattr(name, _refuse)
    with pytest.raises(AssertionError):
        torch.compile(nn.Linear(2, 2))
    from meshwright_dtensor.planning import PlanRequest

    (plan,) = eager().plan(
        Transformer(layers=4), tokens(rows=4), PlanRequest(cluster=LAPTOP_CPU, world_size=4)
    )
    assert plan.world_size == 4


class Looks(nn.Module):
    """Takes another path when its activations are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        return (self.second(hidden) if hidden.mean() < 100 else hidden).sum()


def test_a_model_that_looks_at_data_is_run_on_some() -> None:
    tape = record(Looks(), Batch.of(torch.randn(4, 16)), BOOK.composites)
    assert tape.real and sum(n.name == "linear" for n in tape.nodes) == 2


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
    return nodes, named, saved, tape.activation_bytes, tape.flops


def test_blocks_that_are_not_run_are_as_if_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Transformer(layers=6), Batch.of(tokens())
    ran: list[str] = []
    short = record(model, batch, BOOK.composites)
    monkeypatch.setattr(
        "meshwright_planner.profile.recording.replay_blocks",
        lambda model, watcher, trusted: ran.append("all"),
    )
    whole = record(model, batch, BOOK.composites)
    assert ran == ["all"] and set(short.copied) == {f"layers.{i}" for i in (2, 3, 4)}
    assert not whole.copied and facts(short) == facts(whole)


def test_blocks_that_were_alike_once_are_run_once_in_other_sizes() -> None:
    model, known = Transformer(layers=6), Known()
    record(model, Batch.of(tokens(rows=2)), BOOK.composites, known=known)
    assert known.trusted == {"layers.0"}
    again = record(model, Batch.of(tokens(rows=4)), BOOK.composites, known=known)
    assert set(again.copied) == {f"layers.{i}" for i in (1, 2, 3, 4, 5)}
    assert facts(again) == facts(record(model, Batch.of(tokens(rows=4)), BOOK.composites))


def test_a_block_that_is_not_like_the_others_is_run() -> None:
    """The last of a family does more than its attributes tell: everything is run."""

    class Block(nn.Module):
        def __init__(self, idx: int) -> None:
            super().__init__()
            self.layer_idx, self.a, self.b = idx, nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.relu(self.a(x))
            return self.b(x) if self.layer_idx < 5 else self.b(x).tanh()

    model = nn.Sequential(*(Block(i) for i in range(6)))
    known = Known()
    tape = record(model, Batch.of(torch.randn(4, 8)), BOOK.composites, known=known)
    assert not known.trusted
    assert not tape.copied and sum(n.name == "aten.tanh.default" for n in tape.nodes) == 1


def test_a_scaled_tape_is_the_recorded_one() -> None:
    model = Transformer(layers=2)

    def tape(rows: int) -> Tape:
        return record(model, Batch.of(tokens(rows=rows)), BOOK.composites)

    family = Family(tape(2), tape(4))
    scaled = family.at(16)
    assert scaled is not None and scaled.rows == 16
    assert facts(scaled) == facts(tape(16)) and facts(scaled) != facts(tape(8))
