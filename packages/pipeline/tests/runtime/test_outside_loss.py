"""Losses that are computed outside of the model, from its outputs, match one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pipe_models import Bomb, Chain, chain_batch, chain_plan
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from meshwright_dtensor.errors import StageError, UnsupportedError, UsageError
from meshwright_dtensor.testing.rank_pool import RankPool
from meshwright_pipeline import call_of, pipeline

LIMIT = 1e-5


def far(value: Tensor | None, reference: Tensor | None) -> float:
    if value is None or reference is None:
        return 0.0 if value is reference else float("inf")
    return float((value - reference).abs().max() / reference.abs().max())


class Scored(nn.Module):
    """Outputs of all kinds: rows, flattened rows, a number, a tensor without rows, integers."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.chain = Chain(dropout=dropout)

    def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
        logits = self.chain(ids)["logits"]
        table = self.chain.scale[None].expand(3, -1)
        return logits, logits.flatten(0, 1), logits.square().mean()[None].mean(), table * 2, logits.argmax(-1)


def make(dropout: float) -> nn.Module:
    torch.manual_seed(0)
    return Scored(dropout)


def loss_of(out: tuple[Tensor, ...], labels: Tensor) -> Tensor:
    """Rows interact in it, so it is no sum over microbatches."""
    logits, flat, mean, table, best = out
    assert best.dtype == torch.int64 and not best.requires_grad and flat.shape[0] == labels.numel()
    pooled = logits.mean(1)
    contrast = torch.log_softmax(pooled @ pooled.T, -1).diagonal().mean()
    return F.cross_entropy(flat, labels.flatten()) - 0.3 * contrast + 0.2 * mean + table.square().sum()


def plan(schedule: str) -> Any:
    base = chain_plan(stages=4 if schedule not in ("gpipe", "1f1b") else 2, schedule=schedule)
    rule = base.pipeline
    stages = [[f"chain.{pattern}" for pattern in stage] for stage in rule.stages]
    return base.replace(pipeline=rule.model_copy(update={"stages": tuple(map(tuple, stages))}))


def train(rank: int, size: int, schedule: str, dropout: float) -> tuple[float, float, int]:
    """(largest distance of a loss, of a gradient, most microbatches held), over two steps of two calls each."""
    single, many = make(dropout), pipeline(make(dropout), plan(schedule))
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    losses = worst = 0.0
    for step in range(2):
        results = []
        for model in (single, many):
            torch.manual_seed(7 + step)
            batches = [chain_batch(2 * step + turn, uneven=True) for turn in range(2)]
            parts = [loss_of(model(batch["ids"]), batch["labels"]) for batch in batches]  # both are pending
            (parts[0] + 0.5 * parts[1]).backward()
            results.append((float(parts[0] + parts[1]), torch.get_rng_state()))
        assert torch.equal(results[0][1], results[1][1]), "the generator ends in another state"
        losses = max(losses, abs(results[0][0] - results[1][0]) / abs(results[0][0]))
        for name, p in many.named_parameters():
            worst = max(worst, far(p.grad, single_parameters[name].grad))
    return losses, worst, call_of(many).last.most_alive


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "dropout"), [("1f1b", 0.2), ("interleaved", 0.0), ("zero-bubble", 0.0), ("zbv", 0.2)]
)
def test_outside_loss_matches_one_device(rank_pool: RankPool, schedule: str, dropout: float) -> None:
    stages = 1 if schedule == "1f1b" else 2
    for losses, worst, held in rank_pool.run(2, train, schedule, dropout):
        assert losses < LIMIT and worst < LIMIT
        assert held == 4 * stages  # all microbatches: no backward can run before the loss is known


def refuse(rank: int, size: int) -> list[str]:
    """Errors of a second backward, of a loss inside and outside, and of a stage that fails in its backward."""
    told = []
    many = pipeline(make(0.0), plan("1f1b"))
    batch = chain_batch()
    loss = loss_of(many(batch["ids"]), batch["labels"])
    loss.backward(retain_graph=True)
    both = pipeline(Chain(), chain_plan(outputs="all"))
    out = both(**batch)
    assert out["logits"].requires_grad
    for wrong in (loss, out["loss"] + out["logits"].mean()):
        try:
            wrong.backward()
        except UsageError as error:
            told.append(str(error))
    model = make(0.0)
    model.chain.layers[1].outer.register_forward_hook(
        lambda m, a, out: out if out.is_meta or not out.any() else Bomb.apply(out)
    )
    failing = pipeline(model, plan("1f1b"))
    loss = loss_of(failing(batch["ids"]), batch["labels"])
    try:
        loss.backward()
    except StageError as error:
        told.append(str(error))
    return told


@pytest.mark.slow
def test_errors_of_outside_losses(rank_pool: RankPool) -> None:
    for second, both, failed in rank_pool.run(2, refuse, timeout=150):
        assert "a second time" in second and "call backward() once" in second
        assert "compute all of the loss outside" in both
        assert (
            "stage 0 failed in the backward of microbatch 0, on rank 0: ValueError: boom backward" in failed
        )


def hooked(rank: int, size: int) -> list[str]:
    """Errors of a loss of an activation that a hook has kept, inside and outside, and of a model in a transform; "" where none."""
    kept: list[Tensor] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    def keep_argument(module: nn.Module, args: Any) -> None:
        kept.append(args[0])

    batch, told = chain_batch(), []
    inside, outside, argument = (pipeline(make(), plan) for make, plan in _HOOKED)
    inside.layers[1].register_forward_hook(keep)
    outside.chain.layers[1].register_forward_hook(keep)
    argument.layers[1].register_forward_pre_hook(keep_argument)
    losses = (
        lambda: inside(**batch)["loss"] + kept[-1].square().mean(),
        lambda: loss_of(outside(batch["ids"]), batch["labels"]) + kept[-1].square().mean(),
        lambda: argument(**batch)["loss"] + kept[-1].square().mean(),
        # what hooks keep and do not use is no error
        lambda: inside(**batch)["loss"] + kept[-1].detach().mean().item(),
        lambda: torch.vmap(lambda ids: inside(ids)["logits"])(batch["ids"][None]),
    )
    for loss in losses:
        try:
            loss().backward()
            told.append("")
        except UnsupportedError as error:
            told.append(str(error))
    return told


_HOOKED = (
    (Chain, chain_plan()),
    (lambda: make(0.0), plan("1f1b")),
    (Chain, chain_plan()),
)


@pytest.mark.slow
def test_losses_of_what_hooks_keep_are_refused(rank_pool: RankPool) -> None:
    first, second = rank_pool.run(2, hooked, timeout=150)
    for inside, outside, argument, detached, transform in (first,):
        assert "from the output of module 'layers.1', which a forward hook has kept" in inside
        assert "from the output of module 'chain.layers.1', which a forward hook has kept" in outside
        assert "from an argument of module 'layers.1', which a forward hook has kept" in argument
        assert detached == "" and "calls a pipelined model" in transform
    assert second[3] == "" and "calls a pipelined model" in second[4]


def recompute(rank: int, size: int, preserve: bool, schedule: str) -> tuple[float, float] | str:
    """Blocks with dropout are recomputed: (distance of the loss, of a gradient)."""

    def built() -> nn.Module:
        torch.manual_seed(0)
        model = Chain(dropout=0.3)
        for layer in model.layers:
            forward = layer.forward

            def recomputed(x: Tensor, forward: Any = forward) -> Tensor:
                return checkpoint(
                    lambda y: forward(y + 0.0), x, use_reentrant=False, preserve_rng_state=preserve
                )

            layer.forward = recomputed
        return model

    single, stages = built(), 2 if schedule == "1f1b" else 4
    many = pipeline(built(), chain_plan(stages=stages, schedule=schedule))
    single_parameters = dict(single.named_parameters(remove_duplicate=False))
    losses = []
    for model in (single, many):
        torch.manual_seed(5)
        try:
            loss = model(**chain_batch())["loss"]
        except StageError as error:
            return str(error)
        loss.backward()
        losses.append(loss.item())
    worst = max(far(p.grad, single_parameters[name].grad) for name, p in many.named_parameters())
    return abs(losses[0] - losses[1]) / losses[0], worst


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_recomputed_masks_match_one_device(rank_pool: RankPool, schedule: str) -> None:
    for loss, worst in rank_pool.run(2, recompute, True, schedule):
        assert loss < LIMIT and worst < LIMIT


@pytest.mark.slow
def test_recomputation_without_rng_state_is_refused(rank_pool: RankPool) -> None:
    """The negative control: without the generator's state the masks cannot be reproduced."""
    for told in rank_pool.run(2, recompute, False, "1f1b", timeout=150):
        assert "Recompute with preserve_rng_state=True" in told


def backward_twice(rank: int, size: int, outside: bool) -> tuple[float, str]:
    """(largest distance of a gradient of the step after the refusal, error of a second backward)."""
    models, batch = [], chain_batch()

    def loss_of(model: nn.Module) -> Tensor:
        loss: Tensor = model(**batch)["loss"]
        if outside:
            logits = model(ids=batch["ids"])["logits"]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        return loss

    for parallel in (False, True):
        torch.manual_seed(0)
        models.append(pipeline(Chain(), chain_plan()) if parallel else Chain())
    loss = loss_of(models[1])
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError) as error:
        loss.backward()
    models[1].zero_grad()
    for model in models:
        loss_of(model).backward(retain_graph=True)
    expected, worst = dict(models[0].named_parameters(remove_duplicate=False)), 0.0
    for name, parameter in models[1].named_parameters():
        gradient = expected[name].grad
        assert gradient is not None and parameter.grad is not None
        worst = max(worst, float((parameter.grad - gradient).abs().max() / gradient.abs().max()))
    return worst, str(error.value)


@pytest.mark.parametrize("outside", [False, True])
def test_a_second_backward_is_refused_and_the_next_step_is_right(rank_pool: RankPool, outside: bool) -> None:
    for worst, told in rank_pool.run(2, backward_twice, outside):
        assert worst < 1e-5
        assert "add the losses up and call backward() once" in told
