"""The loss in what a model returns: finds it, and checks that every step computes it alike.

A model may change between steps, for example add an auxiliary loss after some of them. The proof that the loss is additive
then no longer holds. The autograd graph between the loss and the units shows the change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_pipeline.pytrees import tensors_of

_MARK = "meshwright_pipeline: of a unit"
_MOST = 512
"""Autograd nodes that are compared, nearest to the loss first."""
LossPath = tuple[str, ...]
LossPaths = dict[tuple[bool, ...], LossPath]


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
    """The loss. Raises UsageError: the result has none."""
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


# ---- how it is computed


def mark_unit_output(output: Any) -> None:
    """Mark the output of a unit. The graph inside units is not compared: it may differ between batches."""
    for tensor in tensors_of(output):
        # metadata is a property, which torch's stubs declare as a method
        node: Any = tensor.grad_fn
        if node is not None:
            node.metadata[_MARK] = True


def loss_path(loss: torch.Tensor) -> LossPath:
    """Names of the autograd nodes between the units and the loss."""
    nodes: list[Any] = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, names = set(nodes), list[str]()
    # the list grows in the loop
    for node in nodes:
        if _MARK in node.metadata or len(names) == _MOST:
            names.append("unit")
            continue
        names.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return tuple(names[:_MOST])


def check_loss_path(paths: LossPaths, flags: Iterable[bool], loss: torch.Tensor) -> None:
    """Compare the loss path of one microbatch with that of the first step.

    `flags`: which parameters and received values require a gradient. `paths`: of each combination of these.

    Raises UnsupportedError: the loss was computed by other operations than in the first step.
    """
    path = loss_path(loss)
    if paths.setdefault(tuple(flags), path) != path:
        raise UnsupportedError(
            "the code that computes the loss runs other operations than in the first step with a batch of the same shapes. "
            "For those, the loss was proven additive over microbatches. Set pipeline.microbatches to 1, or compute the loss "
            "outside of the model"
        )
