"""What the comparison with one device needs of a model, and how a tiny architecture of transformers gives it."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from .batches import batch_of
from .catalogue import Architecture, build

SEED = 3


class Subject(Protocol):
    """A model with its batch and loss. It is sent to ranks by value, so it holds names."""

    def model(self, dtype: torch.dtype) -> nn.Module:
        """A new model in training mode, the same at every call."""
        ...

    def batch(self, model: nn.Module, dtype: torch.dtype) -> Any:
        """What the model is called with, a dict of keywords or a tuple of arguments; draws no numbers."""
        ...

    def loss(self, output: Any, batch: Any) -> Tensor:
        """A number, of what the model returned for the batch."""
        ...


@dataclass(frozen=True)
class Tiny:
    """An architecture of transformers in its smallest form."""

    architecture: Architecture

    def model(self, dtype: torch.dtype) -> nn.Module:
        seed_all(SEED)
        model: Any = build(self.architecture).to(dtype)
        if dtype == torch.float64 and hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # torch's grouped product knows no float64
        return model

    def batch(self, model: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
        return in_dtype(batch_of(self.architecture, model), dtype)

    def loss(self, output: Any, batch: Any) -> Tensor:
        return loss_of(output, batch)


def loss_of(output: Any, batch: dict[str, Tensor]) -> Tensor:
    """The model's own loss, or that of its class scores where it has none."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    scores = getattr(output, "logits", None)
    return nn.functional.cross_entropy(output[0] if scores is None else scores, batch["labels"])


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have `dtype`."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, batch
    )


def seed_all(seed: int) -> None:
    """Seed torch's generator and Python's, which some models draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
