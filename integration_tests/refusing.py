"""Models for the command line: some in order, some to refuse, one that is wrong in parallel."""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import torch
from torch import Tensor, nn
from zoo import Plain, llama, plain_batch


def wrong_keys() -> tuple[nn.Module, dict[str, Any]]:
    """A batch with a key that the model's forward does not take."""
    return Plain(), {**plain_batch(), "pixels": torch.zeros(4, 2)}


def no_pair() -> nn.Module:
    """The model without its batch."""
    return Plain()


def raising() -> tuple[nn.Module, dict[str, Any]]:
    """A factory that fails."""
    raise KeyError("the data set")


def small_llama(batch_size: int = 4, sequence_length: int = 24) -> tuple[nn.Module, dict[str, Any]]:
    """A model and a batch that are in order."""
    tokens = torch.randint(128, (batch_size, sequence_length))
    return llama(), {"input_ids": tokens, "labels": tokens}


class Lossless(Plain):
    """Returns what a loss could be made of."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return {"logits": super().forward(x, labels).logits}


def lossless() -> tuple[nn.Module, dict[str, Any]]:
    """A model whose loss is made outside, where the command line cannot come."""
    return Lossless(), plain_batch()


class Rankish(Plain):
    """Every rank computes something else: no layout can make this the model of one device."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        return super().forward(x * (1.0 + int(os.environ.get("RANK", "0"))), labels)


def slow_to_say() -> tuple[nn.Module, dict[str, Any]]:
    """The same, where the rank that reports takes long about it."""
    from meshwright_parallel.verification.report import VerificationReport

    # the command builds the model several times
    render = getattr(VerificationReport.render, "__wrapped__", VerificationReport.render)

    @functools.wraps(render)
    def slowly(report: VerificationReport) -> str:
        time.sleep(3)
        return render(report)

    VerificationReport.render = slowly  # type: ignore[method-assign, assignment]
    return rankish()


def rankish() -> tuple[nn.Module, dict[str, Any]]:
    """A model that breaks the promise, in order to see that it is caught."""
    return Rankish(), plain_batch()
