"""Batches whose rows the microbatches cannot share equally, the last of a loader say, against one device."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import Chain, chain_batch, chain_plan

from meshwright_dtensor.errors import StageError, UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline

LIMIT = 1e-5
ROWS = [8, 5, 3, 1, 8, 7]


def train(rank: int, size: int, plan: ParallelPlan, dropout: float, outside: bool) -> dict[str, float]:
    """The largest distances from one device, over steps with and without gradients."""
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Chain(dropout=dropout))
    pipeline(models[1], plan)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9) for model in models]
    references = dict(models[0].named_parameters(remove_duplicate=False))
    far: dict[str, float] = {}
    for step, rows in enumerate(ROWS):
        batch = chain_batch(step, uneven=rows > 3, rows=rows)
        losses, states = [], []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            if outside:
                logits = model(ids=batch["ids"])["logits"]
                assert logits.shape[0] == rows
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            else:
                loss = model(**batch)["loss"]
            loss.backward()
            losses.append(loss.item())
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        far[f"loss of {rows} rows"] = abs(losses[0] - losses[1])
        for name, parameter in models[1].named_parameters():
            expected, many = references[name].grad, parameter.grad
            assert expected is not None and many is not None
            far[f"gradient of {name}, {rows} rows"] = float(
                (expected - many).abs().max() / expected.abs().max()
            )
        for optimizer in optimizers:
            optimizer.step()
        for model in models:
            model.eval()
        with torch.no_grad():
            results = [model(**batch) for model in models]
        for name in ("loss", "logits"):
            expected, many = (result[name] for result in results)
            assert expected.shape == many.shape
            far[f"{name} without gradients, {rows} rows"] = float(
                (expected - many).abs().max() / expected.abs().max()
            )
        for model in models:
            model.train()
    return far


def check(ranks: list[dict[str, float]]) -> None:
    for far in ranks:
        assert not {name: value for name, value in far.items() if not value < LIMIT}


def test_rows_that_microbatches_cannot_share(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, chain_plan(microbatches=2), 0.0, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "stages"), [("1f1b", 2), ("gpipe", 2), ("interleaved", 4), ("zero-bubble", 2)]
)
def test_every_schedule_with_dropout(rank_pool: RankPool, schedule: str, stages: int) -> None:
    check(rank_pool.run(2, train, chain_plan(schedule=schedule, stages=stages), 0.2, False))


@pytest.mark.slow
def test_a_loss_outside(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, chain_plan(), 0.2, True))


def warned(rank: int, size: int) -> list[str]:
    model = pipeline(Chain(), chain_plan())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for rows in (8, 5, 8, 3):
            model(**chain_batch(rows=rows))["loss"].backward()
    return [str(warning.message) for warning in caught]


def test_the_first_such_step_warns(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, warned)
    assert len(first) == 1 and "cannot share the rows" in first[0] and "drop_last=True" in first[0]
    assert not second


class Soft(Chain):
    """A chain whose input has floating-point values."""

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x + 0)
        return (self.norm(x) * self.scale).square().mean()


def refused(rank: int, size: int) -> str:
    model = pipeline(Soft(), chain_plan())
    with pytest.raises((UsageError, StageError)) as error:
        model(torch.randn(6, 8, requires_grad=True))
    return str(error.value)


def test_gradients_of_uneven_inputs_are_refused(rank_pool: RankPool) -> None:
    for text in rank_pool.run(2, refused):
        assert "a batch of 6 rows cannot be split into 4 equal microbatches; pad the batch" in text
