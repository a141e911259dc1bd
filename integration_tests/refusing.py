"""Models for the command line: some in order, some to refuse, one that is wrong in parallel."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from zoo import Plain, causal, llama, plain_batch


def wrong_keys() -> tuple[nn.Module, dict[str, Any]]:
    """A batch with a key that the model's forward does not take."""
    return Plain(), {**plain_batch(), "pixels": torch.zeros(4, 2)}


def no_pair() -> nn.Module:
    """The model without its batch."""
    return Plain()


def raising() -> tuple[nn.Module, dict[str, Any]]:
    """A factory that fails."""
    raise KeyError("the data set")


def small_llama() -> tuple[nn.Module, dict[str, Any]]:
    """A model and a batch that are in order."""
    return llama(), causal(128)


class Rankish(Plain):
    """Every rank computes something else: no layout can make this the model of one device."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x * (1.0 + int(os.environ.get("RANK", "0"))), labels)


def rankish() -> tuple[nn.Module, dict[str, Any]]:
    """A model that breaks the promise, in order to see that it is caught."""
    return Rankish(), plain_batch()
