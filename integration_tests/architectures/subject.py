"""What the comparison with one device needs of a model."""

from __future__ import annotations

import random
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

SEED = 3


class NotBuildable(Exception):
    """A model cannot be made here; the message says why."""


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


def in_dtype(batch: Any, dtype: torch.dtype) -> Any:
    """A batch whose floating-point tensors have `dtype`."""
    return tree_map_only(Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, batch)


def seed_all(seed: int) -> None:
    """Seed torch's generator, and Python's and NumPy's, which some models draw from."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)
