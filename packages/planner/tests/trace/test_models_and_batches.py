"""Models and batches of a plan: real or meta, scaled, rejected, data-dependent, restored."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from planner_models import LAPTOP_CPU, Mlp, Transformer, best, eager, tokens
from torch import nn

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.recorder.record import record


def test_batch_that_forward_does_not_accept_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"Transformer.forward .*'idz'; it accepts: ids.*, labels") as caught:
        best(Transformer(layers=1), {"idz": torch.zeros(2, 8, dtype=torch.long), **tokens()})
    assert caught.value.__cause__ is None
    for bad in ({}, 3, {"ids": [1, 2]}):
        with pytest.raises(UsageError, match="batch"):
            best(Transformer(layers=1), bad)
    with pytest.raises(UsageError, match=r"batch has no rows: 'ids' is of shape \(0, 32\); give an example"):
        best(Transformer(layers=1), tokens(rows=0))
    with pytest.raises(UsageError, match="Mlp raised"):
        best(Mlp(), torch.randn(2, 63))


def test_model_that_needs_more_rows_than_a_rank_has() -> None:
    """Norms of the batch refuse one row; on ranks they see the rows of all."""
    model = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    plans = eager().plan(
        model, torch.randn(4, 16), PlanRequest(cluster=LAPTOP_CPU, world_size=4, dp=4, top_k=2)
    )
    assert plans[0].degrees["dp"] == 4
    with pytest.raises(UsageError, match="Expected more than 1 value per channel"):
        eager().plan(model, torch.randn(1, 16), PlanRequest(cluster=LAPTOP_CPU, world_size=1))


def test_batch_in_unregistered_class_is_rejected() -> None:
    with pytest.raises(UsageError, match=r"no tensor, only SimpleNamespace; .*dicts, tuples, lists"):
        best(Mlp(), {"x": SimpleNamespace(x=torch.randn(2, 64))})


def test_recording_restores_the_model() -> None:
    class Remembers(Mlp):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            self.act = nn.Tanh()  # some models replace layers when they see their first input
            return super().forward(F.dropout(x, 0.5, self.training))

    model = Remembers()
    model.act = activation = nn.ReLU()
    before = {n: (id(p), p.clone()) for n, p in model.named_parameters()}
    torch.manual_seed(3)
    rng = torch.get_rng_state()
    best(model, torch.randn(4, 64), world_size=2, tp=2)
    torch.manual_seed(3)
    plan = best(model, torch.zeros(4, 64), world_size=2, tp=2)
    assert torch.equal(torch.get_rng_state(), rng) and plan.degree("tp") == 2
    after = dict(model.named_parameters())
    assert all(id(after[n]) == i and torch.equal(after[n], p) for n, (i, p) in before.items())
    assert model.act is activation
    assert not hasattr(model, "seen") and all(p.grad is None for p in model.parameters())
    assert not model._forward_hooks and type(model.up.weight) is nn.Parameter


def test_meta_models_and_meta_batches() -> None:
    with torch.device("meta"):
        model = Transformer()
        batch = tokens()
    real = best(Transformer(), tokens(), world_size=2, tp=2)
    assert best(model, batch, world_size=2, tp=2) == real
    assert all(p.is_meta for p in model.parameters())


def test_global_batch_size_scales_the_example() -> None:
    model = Transformer(layers=1)
    scaled = best(model, tokens(rows=2), global_batch_size=8, world_size=4, dp=4)
    assert scaled == best(model, tokens(rows=8), world_size=4, dp=4)
    with pytest.raises(UsageError, match="dp=4 is not a legal degree"):
        best(model, tokens(rows=2), world_size=4, dp=4)


class Picky(nn.Module):
    """Reads its data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return y[y.sum(-1) > -1e9].sum() if bool((y > -1e9).all()) else y.sum()


def test_data_dependent_model_needs_a_real_run() -> None:
    plan = best(Picky(), torch.randn(4, 8))
    assert any("real run" in note for note in plan.provenance.notes)
    assert not any("real run" in note for note in best(Mlp(), torch.randn(4, 64)).provenance.notes)
    with torch.device("meta"):
        meta = Picky()
    assert best(meta, torch.randn(4, 8)).world_size == 1
    with torch.device("meta"):
        meta.linear = nn.Linear(8, 8)
        meta.table = nn.Embedding(2**28, 8)
    with pytest.raises(UnsupportedError, match="Picky reads the data"):
        best(meta, torch.randn(4, 8))


class ReadsIntegers(Mlp):
    """Reads the integers of its batch and values computed from them, but no floating-point value."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if bool(mask.all()) and int(torch.arange(len(x)).max()) == len(x) - 1:
            return super().forward(x)
        return super().forward(x * mask[:, None])


def test_reading_integers_needs_no_real_run() -> None:
    def operations(mask: torch.Tensor) -> int:
        batch = {"x": torch.randn(4, 64), "mask": mask}
        tape = record(ReadsIntegers(), Batch.of(batch), RuleBook.first_party().composites)
        assert not tape.real
        return len(tape.nodes)

    ones = torch.ones(4, dtype=torch.long)
    assert operations(ones) == operations(ones.to("meta")) < operations(torch.tensor([1, 1, 0, 1]))
