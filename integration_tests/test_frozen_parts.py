"""Freezing between the steps of a pipeline whose stages are sharded: gradients and parameters of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import whole
from plan_once import one_and_many
from zoo import CASES

from meshwright_dtensor.testing.rank_pool import RankPool

LIMIT = 1e-4


def freeze(model: Any, step: int) -> None:
    """The embedding, tied to the head of the last stage, and the first block; then one bias; then nothing."""
    base = model.transformer
    for part in (base.wte, base.wpe, base.h[:1]):
        part.requires_grad_(step != 1)
    base.h[-1].mlp.c_fc.bias.requires_grad_(step != 2)


def check(rank: int, size: int, pins: dict[str, Any]) -> list[str]:
    """What differs in four steps."""
    batch = CASES["gpt2"].batch()
    models = one_and_many(CASES["gpt2"].model, batch, microbatches=2, pp=2, **pins)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
    references = dict(models[0].named_parameters(remove_duplicate=False))
    wrong = []
    for step in range(4):
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            freeze(model, step)
            optimizer.zero_grad()
            torch.manual_seed(step)
            loss = model(**batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        if abs(losses[0] - losses[1]) > LIMIT:
            wrong.append(f"loss of step {step}: {losses}")
        for name, parameter in models[1].named_parameters():
            expected, many = references[name].grad, parameter.grad
            if expected is None or many is None:
                if expected is not many:
                    wrong.append(f"gradient of {name} in step {step}: {expected is None} {many is None}")
                continue
            distance = float((whole(many) - expected).abs().max())
            if distance > LIMIT * float(expected.abs().max()):
                wrong.append(f"gradient of {name} in step {step}: {distance}")
        for optimizer in optimizers:
            optimizer.step()
        for name, parameter in models[1].named_parameters():
            distance = float((whole(parameter) - references[name]).detach().abs().max())
            if distance > LIMIT:
                wrong.append(f"parameter {name} in step {step}: {distance}")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    "pins", [{"dp": 1, "tp": 2}, {"dp": 2, "tp": 1, "zero": 2}, {"dp": 2, "tp": 1, "zero": 3}], ids=str
)
def test_frozen_between_steps(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for wrong in rank_pool.run(4, check, pins, timeout=150):
        assert not wrong


def frozen_inside_of_a_step(rank: int, size: int, pins: dict[str, Any]) -> list[Any]:
    """The gradients on one device and on many, of a loss that is older than a call of the model with frozen parts.

    PEFT does so where another adapter, the reference of DPO, computes between the forward and the backward pass.
    """
    batch = CASES["gpt2"].batch()
    gradients = []
    for model in one_and_many(CASES["gpt2"].model, batch, **pins):
        torch.manual_seed(0)
        loss = model(**batch).loss
        model.transformer.h.requires_grad_(False)
        with torch.no_grad():
            model(**batch)
        model.transformer.h.requires_grad_(True)
        loss.backward()
        gradients.append([None if p.grad is None else whole(p.grad) for p in model.parameters()])
    return gradients


@pytest.mark.parametrize("pins", [{"dp": 2}, {"zero": 3}], ids=str)
def test_frozen_between_forward_and_backward(rank_pool: RankPool, pins: dict[str, Any]) -> None:
    for expected, many in rank_pool.run(2, frozen_inside_of_a_step, pins):
        for value, other in zip(expected, many, strict=True):
            assert float((value - other).abs().max()) <= LIMIT * float(value.abs().max())
