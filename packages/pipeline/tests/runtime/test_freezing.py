"""Parameters that are frozen and unfrozen between the steps of a pipeline, against one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import Chain, chain_batch, chain_plan
from torch import nn

from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import pipeline

LIMIT = 1e-5
CHANGES: dict[str, Callable[[Any, bool], Any]] = {
    "half a stage": lambda m, on: m.layers[:1].requires_grad_(on),
    "first stage": lambda m, on: [m.embed.requires_grad_(on), m.layers[:2].requires_grad_(on)],
    "last stage": lambda m, on: [part.requires_grad_(on) for part in (m.layers[2:], m.norm, m.head)],
    "one parameter": lambda m, on: m.layers[3].inner.weight.requires_grad_(on),
    "attribute": lambda m, on: setattr(m.layers[0].outer.bias, "requires_grad", on),
    "tied, by its first name": lambda m, on: m.embed.requires_grad_(on),
    "tied, by its last name": lambda m, on: m.head.weight.requires_grad_(on),
    "outside of units": lambda m, on: m.scale.requires_grad_(on),
    "all but the norm": lambda m, on: [
        p.requires_grad_(on) for n, p in m.named_parameters() if "norm" not in n
    ],
    "layers by name": lambda m, on: [
        p.requires_grad_(on)
        for n, p in m.named_parameters()
        if n.startswith("layers.0") or n == "embed.weight"
    ],
}


def distance(many: nn.Module, single: nn.Module, gradients: bool) -> float:
    """The largest distance of a gradient, or parameter, of this rank from that of one device; inf where only one has it."""
    references = dict(single.named_parameters(remove_duplicate=False))
    worst = 0.0
    for name, parameter in many.named_parameters():
        ours, theirs = parameter, references[name]
        if parameter.requires_grad != theirs.requires_grad:
            return float("inf")
        if gradients:
            if (ours.grad is None) != (theirs.grad is None):
                return float("inf")
            if ours.grad is None or theirs.grad is None:
                continue
            ours, theirs = ours.grad, theirs.grad
        worst = max(worst, float((ours - theirs).detach().abs().max() / theirs.detach().abs().max()))
    return worst


def train(
    rank: int, size: int, plan: ParallelPlan, changes: list[str], outside: bool
) -> list[tuple[str, float]]:
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Chain())
    single, many = models[0], pipeline(models[1], plan)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (single, many)]
    worst = []
    for change, trained in [(change, on) for change in changes for on in (True, False, True)]:
        losses = []
        batch = chain_batch(len(worst), uneven=True)
        for model, optimizer in zip((single, many), optimizers, strict=True):
            CHANGES[change](model, trained)
            optimizer.zero_grad()
            if outside:
                logits = model(ids=batch["ids"])["logits"]
                loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
            else:
                loss = model(**batch)["loss"]
            (loss * 0.5).backward()
            losses.append(loss.item())
        far = max(abs(losses[0] - losses[1]), distance(many, single, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
        far = max(far, distance(many, single, gradients=False))
        with torch.no_grad():
            outputs = [model(**batch)["logits"] for model in (single, many)]
        far = max(far, float((outputs[0] - outputs[1]).abs().max() / outputs[0].abs().max()))
        worst.append((f"{change} {trained}", far))
    return worst


def check(ranks: list[list[tuple[str, float]]]) -> None:
    for steps in ranks:
        assert not [step for step in steps if not step[1] < LIMIT]


SCHEDULES = [("1f1b", 2), ("gpipe", 2), ("interleaved", 4), ("zero-bubble", 2), ("zbv", 4)]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "stages"), SCHEDULES)
def test_frozen_and_unfrozen_between_steps(rank_pool: RankPool, schedule: str, stages: int) -> None:
    plan = chain_plan(stages=stages, schedule=schedule)
    check(rank_pool.run(2, train, plan, list(CHANGES), False))


@pytest.mark.slow
def test_frozen_with_a_loss_outside(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, chain_plan(), list(CHANGES), True))


def test_a_frozen_stage_in_one_step(rank_pool: RankPool) -> None:
    check(rank_pool.run(2, train, chain_plan(), ["first stage"], False))


def train_half(rank: int, size: int, kind: str) -> float:
    """Fine-tuning: the first stage is frozen before the optimizer takes the parameters that are left."""
    worst, results, reference = 0.0, [], None
    for parallel in (False, True):
        torch.manual_seed(0)
        model = pipeline(Chain(), chain_plan()) if parallel else Chain()
        CHANGES["first stage"](model, False)
        model.scale.requires_grad_(False)
        model(**chain_batch())["loss"].detach()
        trained = (p for p in model.parameters() if p.requires_grad)
        optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(trained, lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for step in range(2):
            optimizer.zero_grad()
            loss = model(**chain_batch(step))["loss"]
            loss.backward()
            optimizer.step()
            scheduler.step()
            results.append(loss.item())
        optimizer.load_state_dict(optimizer.state_dict())
        assert rank or not parallel or not any(group["params"] for group in optimizer.param_groups)
        reference = reference or model
        worst = max(worst, distance(model, reference, gradients=False))
    return max(
        worst, *(abs(expected - many) for expected, many in zip(results[:2], results[2:], strict=True))
    )


@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_an_optimizer_without_parameters_on_a_frozen_stage(rank_pool: RankPool, kind: str) -> None:
    assert max(rank_pool.run(2, train_half, kind)) < LIMIT


def train_nothing(rank: int, size: int) -> list[tuple[bool, str]]:
    """Of models with frozen parameters, and of one that trains: whether the loss has a gradient, and the error of backward."""
    model, outcomes = pipeline(Chain(), chain_plan()), []
    for trains in (False, True):
        model.requires_grad_(trains)
        loss = model(**chain_batch())["loss"]
        try:
            loss.backward()
            outcomes.append((loss.requires_grad, ""))
        except RuntimeError as error:
            outcomes.append((loss.requires_grad, str(error)))
    return outcomes


def test_a_loss_of_frozen_parameters_has_no_gradient(rank_pool: RankPool) -> None:
    for (frozen, error), trained in rank_pool.run(2, train_nothing):
        assert not frozen and "does not require grad" in error
        assert trained == (True, "")
