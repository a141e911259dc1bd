"""A last batch that microbatches cannot share equally, in a pipeline whose stages are sharded: values of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import whole
from plan_once import one_and_many
from zoo import CASES

from meshwright_dtensor.testing.rank_pool import RankPool

LIMIT = 1e-4


def check(rank: int, size: int, pins: dict[str, Any]) -> list[str]:
    """What differs over batches of all rows, of fewer, and of all again; in evaluation too."""
    batch = CASES["gpt2"].batch()
    models = one_and_many(CASES["gpt2"].model, batch, microbatches=2, pp=2, **pins)
    rows = batch["input_ids"].shape[0]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    references = dict(models[0].named_parameters(remove_duplicate=False))
    wrong = []
    for step, count in enumerate((rows, rows - 1, rows)):
        part = {name: value[:count] for name, value in batch.items()}
        values: list[list[torch.Tensor]] = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = model(**part).loss
            loss.backward()
            model.eval()
            with torch.no_grad():
                values.append([whole(loss), whole(model(**part).logits)])
            model.train()
        for expected, many in zip(*values, strict=True):
            if expected.shape != many.shape or (expected - many).abs().max() > LIMIT:
                wrong.append(f"result of {count} rows: {list(expected.shape)} {list(many.shape)}")
        for name, parameter in models[1].named_parameters():
            gradient = references[name].grad
            assert gradient is not None and parameter.grad is not None
            if (whole(parameter.grad) - gradient).abs().max() > LIMIT * gradient.abs().max():
                wrong.append(f"gradient of {name}, {count} rows")
        for optimizer in optimizers:
            optimizer.step()
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins",
    [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1}, {"dp": 2, "tp": 1, "zero": 2}, {"dp": 2, "tp": 1, "zero": 3}],
    ids=str,
)
def test_batches_that_microbatches_cannot_share(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for wrong in rank_pool.run(4, check, pins, timeout=150):
        assert not wrong
