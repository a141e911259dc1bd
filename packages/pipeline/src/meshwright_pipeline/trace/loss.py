"""Finds the loss in what a model returns, and replaces it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from meshwright_dtensor.errors import UsageError
from meshwright_pipeline._torch import pytree


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss in a result: the result itself, its `.loss`, its `["loss"]` or its first element, if that is a scalar."""
    candidates = [result, getattr(result, "loss", None)]
    if isinstance(result, Mapping):
        candidates.append(result.get("loss"))
    elif isinstance(result, (tuple, list)) and result:
        candidates.append(result[0])
    for value in candidates:
        if isinstance(value, torch.Tensor) and value.dim() == 0:
            return value
    return None


def need_loss(result: Any) -> torch.Tensor:
    """The loss.

    Raises:
        UsageError: the result has none.
    """
    loss = loss_of(result)
    if loss is None:
        raise UsageError(
            f"the model returned a {type(result).__name__} without a loss (a scalar, its .loss, its 'loss' or its first element). "
            "When it was profiled with a batch of the same shapes, it returned one"
        )
    return loss


def plain_or_none(leaf: Any) -> Any:
    """The leaf if it is a plain value; None for tensors, and for objects such as a cache, whose parts are on all stages."""
    return leaf if isinstance(leaf, (bool, int, float, str)) else None


def with_loss(result: Any, loss: torch.Tensor, keep: bool) -> Any:
    """The result with another loss. Other tensors are kept with `keep`, otherwise replaced by None."""
    old = loss_of(result)
    leaves, spec = pytree.tree_flatten(result)
    # an object that pytree does not know
    if not any(leaf is old for leaf in leaves):
        changed = copy.copy(result)
        changed.loss = loss
        return changed

    def replaced(leaf: Any) -> Any:
        if leaf is old:
            return loss
        return plain_or_none(leaf) if not keep or not isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_unflatten([replaced(leaf) for leaf in leaves], spec)
