"""Models that return losses and numbers of every kind, in every position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from pipe_models import TOKENS, Chain, chain_batch, chain_plan
from torch import Tensor, nn

from meshwright_dtensor.plan import ParallelPlan

Judge = Callable[[Any, Tensor, Tensor, Tensor], Any]


def per_token(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def total(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def by_hand(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    return (per_token(logits, labels) * mask).sum() / mask.sum().clamp(min=1)


def balance(logits: Tensor) -> Tensor:
    """A product of means over rows, like the load balancing loss of experts."""
    shares = logits.softmax(-1).flatten(0, 1)
    return (shares.mean(0) * (shares > 0.05).float().mean(0)).sum() * shares.shape[-1]


def accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    return ((logits.argmax(-1) == labels) & (labels != -100)).sum() / (labels != -100).sum()


def by_shares(logits: Tensor, labels: Tensor, shares: Tensor) -> Tensor:
    return (per_token(logits, labels) * shares).sum() / shares.sum()


def inside(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    loss = mean(x, y)
    loss += 0.01 * x.square().mean()
    return loss


def shifted(model: Any, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """As in the causal models of transformers."""
    y = F.pad(y, (0, 1), value=-100)[..., 1:].contiguous()
    return F.cross_entropy(x.float().view(-1, x.shape[-1]), y.view(-1), ignore_index=-100)


ADDING: dict[str, Judge] = {
    "shifted": shifted,
    "mean": lambda m, x, y, k: mean(x, y),
    "sum": lambda m, x, y, k: {"loss": total(x, y)},
    "sum by rows": lambda m, x, y, k: {"loss": total(x, y) / x.shape[0]},
    "by hand": lambda m, x, y, k: {"loss": by_hand(x, y, k), "logits": x},
    "by valid targets": lambda m, x, y, k: (per_token(x, y).sum() / (y != -100).sum(), x),
    "mean over rows": lambda m, x, y, k: (per_token(x, y) * k).sum(1).mean(),
    "with a penalty": lambda m, x, y, k: mean(x, y) * m.weight.exp() + m.weight.square() + 0.3,
    "in place": inside,
    "class weights": lambda m, x, y, k: F.cross_entropy(x.flatten(0, 1), y.flatten(), m.classes),
    "no grammar": lambda m, x, y, k: (
        -(x.log_softmax(-1).gather(-1, y.clamp(min=0)[..., None])[..., 0] * k).sum() / k.sum()
    ),
    "squares": lambda m, x, y, k: F.mse_loss(x[..., 0], k, reduction="sum"),
}
"""Losses that are proven additive over microbatches."""

WHOLE: dict[str, Judge] = {
    "products": lambda m, x, y, k: {"loss": mean(x, y) + 0.01 * balance(x), "balance": balance(x)},
    "contrast": lambda m, x, y, k: (
        F.cross_entropy(x.mean(1) @ x.mean(1).T, torch.arange(x.shape[0], device=x.device)) * 1.0
    ),
    "normalised": lambda m, x, y, k: mean(x / (0.5 + x.square().mean((0, 1))) * m.weight, y),
    "a sum and a mean": lambda m, x, y, k: mean(x, y) + 0.01 * total(x, y),
    "a root": lambda m, x, y, k: F.mse_loss(x[..., 0], k).sqrt(),
    "read by Python": lambda m, x, y, k: (per_token(x, y) * k).sum() / max(k.sum().item(), 1),
    "picked": lambda m, x, y, k: per_token(x, y)[k > 0].mean(),
    "first rows": lambda m, x, y, k: mean(x, y) + x[:3].square().sum(),
    "by a mask by rows": lambda m, x, y, k: (per_token(x, y) * k).sum() / (k.sum() / k.shape[0]),
    "by weights that sum to one": lambda m, x, y, k: by_shares(x, y, k / k.sum()),
    "repeated": lambda m, x, y, k: per_token(x, y).mean(1).expand(x.shape[0], x.shape[0]).sum(),
    "asked of the loss": lambda m, x, y, k: mean(x, y) if mean(x, y) < 3.3 else 2 * mean(x, y),
    "asked of a mask": lambda m, x, y, k: total(x, y) if k.all() else mean(x, y),
    "by half of the rows": lambda m, x, y, k: total(x, y) / (x.shape[0] // 2 + 1),
    "by many rows": lambda m, x, y, k: total(x, y) / max(x.shape[0], 5),
    "by a matrix": lambda m, x, y, k: total(x @ (torch.eye(x.shape[-1]) / x.shape[0]), y),
    "whole numbers": lambda m, x, y, k: mean(x, y) + total(x, y).detach().long().float() / x.shape[0],
    "lower rows": lambda m, x, y, k: per_token(x, y).tril().sum(),
    "by shape of a choice": lambda m, x, y, k: total(x, y) / k.nonzero().shape[0],
    "padded": lambda m, x, y, k: (
        F.pad(per_token(x, y), (0, 1), value=1 / x.shape[0]) * F.pad(k, (0, 1))
    ).sum(),
}
"""Losses that are not additive, or not proven to be."""

OUTSIDE: dict[str, Judge] = {
    "second": lambda m, x, y, k: (x, mean(x, y)),
    "a sum second": lambda m, x, y, k: (x, total(x, y)),
    "by hand second": lambda m, x, y, k: [x, by_hand(x, y, k)],
    "nested": lambda m, x, y, k: {"logits": x, "numbers": [{"train": mean(x, y)}, (accuracy(x, y),)]},
    "a matrix of rows with rows": lambda m, x, y, k: (x.mean(1) @ x.mean(1).T, mean(x, y)),
}
"""Outputs whose loss is not where a step looks for it."""

WITH_NUMBERS: dict[str, Judge] = {
    "numbers": lambda m, x, y, k: {
        "loss": mean(x, y),
        "logits": x,
        "accuracy": accuracy(x, y),
        "count": (y != -100).sum(),
        "second": total(x, y).detach(),
    },
    "by hand in place": lambda m, x, y, k: (per_token(x, y) * k).sum() / k.sum().clamp_(min=1),
    "additive numbers": lambda m, x, y, k: (by_hand(x, y, k), total(x, y), k.sum(), x, x.square().mean()),
}
"""Outputs with other numbers next to the loss."""


class Judged(nn.Module):
    """A chain, and a function of its logits."""

    def __init__(self, judge: Judge) -> None:
        super().__init__()
        self.chain = Chain()
        self.weight = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("classes", torch.linspace(0.5, 1.5, 29))
        self.judge = judge

    def forward(self, ids: Tensor, labels: Tensor, mask: Tensor) -> Any:
        return self.judge(self, self.chain(ids)["logits"], labels, mask)


def judged(judge: Judge) -> Judged:
    torch.manual_seed(0)
    return Judged(judge)


def judged_batch(step: int) -> dict[str, Tensor]:
    """Uneven labels and masks; the first two rows have none."""
    generator = torch.Generator().manual_seed(100 + step)
    batch = chain_batch(step)
    mask = (torch.rand(8, TOKENS, generator=generator) > torch.rand(8, 1, generator=generator)).float()
    mask[:2] = 0
    mask[2, 0] = 1
    batch["labels"] = torch.where(mask > 0, batch["labels"], -100)
    return batch | {"mask": mask}


def judged_plan(schedule: str, **changes: Any) -> ParallelPlan:
    made = chain_plan(stages=2 if schedule in ("gpipe", "1f1b") else 4, schedule=schedule, **changes)
    assert made.pipeline is not None
    stages = tuple(tuple(f"chain.{name}" for name in stage) for stage in made.pipeline.stages)
    return made.replace(pipeline=made.pipeline.model_copy(update={"stages": stages}))
