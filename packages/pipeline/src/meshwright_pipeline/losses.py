"""The loss of a step: where it stands in what a model returns."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from meshwright_dtensor.errors import UsageError
from meshwright_pipeline._torch import pytree


def loss_of(result: Any) -> torch.Tensor | None:
    """The loss in what a model returns: itself, its `.loss`, its `["loss"]` or its first element, where that has no dims."""
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
        UsageError: there is none, though there was one when the model was profiled.
    """
    loss = loss_of(result)
    if loss is None:
        raise UsageError(
            f"the model returned a {type(result).__name__} without a loss (a number, its .loss, its 'loss' or its first "
            "element), which it had when it was profiled with a batch of the same shapes"
        )
    return loss


def plain_or_none(leaf: Any) -> Any:
    """What is no tensor and no object with a state of its own, such as a cache, of which each stage has a part."""
    return leaf if isinstance(leaf, (bool, int, float, str)) else None


def with_loss(result: Any, loss: torch.Tensor, keep: bool) -> Any:
    """The same result with another loss; unless `keep`, with None for every other tensor."""
    old = loss_of(result)
    leaves, spec = pytree.tree_flatten(result)
    if not any(leaf is old for leaf in leaves):  # an object that pytree does not know
        changed = copy.copy(result)
        changed.loss = loss
        return changed

    def one(leaf: Any) -> Any:
        if leaf is old:
            return loss
        return plain_or_none(leaf) if not keep or not isinstance(leaf, torch.Tensor) else leaf

    return pytree.tree_unflatten([one(leaf) for leaf in leaves], spec)
