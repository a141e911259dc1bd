"""Tiny architectures of transformers as subjects of the comparison with one device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batches import batch_of
from .catalogue import Architecture, build
from .subject import SEED, in_dtype, seed_all


@dataclass(frozen=True)
class Tiny:
    """An architecture of transformers in its smallest form, or with `layers`; its batch `times` over."""

    architecture: Architecture
    layers: int | None = None
    times: int = 1

    def model(self, dtype: torch.dtype) -> nn.Module:
        seed_all(SEED)
        model: Any = build(self.architecture, self.layers).to(dtype)
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch's grouped product knows no float64
        return model

    def batch(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        batch = batch_of(self.architecture, model)
        return in_dtype(
            {k: torch.cat([v, v.flip(0)]) if self.times > 1 else v for k, v in batch.items()}, dtype
        )

    def loss(self, output: Any, batch: Any) -> Tensor:
        return loss_of(output, batch)


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or that of its class scores where it has none."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    scores = getattr(output, "logits", None)
    return nn.functional.cross_entropy(output[0] if scores is None else scores, batch["labels"])
