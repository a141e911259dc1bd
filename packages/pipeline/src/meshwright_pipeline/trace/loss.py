"""The loss of a step: where it stands in what a model returns.

Whether the code behind the units still computes the loss as it did when that was found to add up.

A model may do something else in later steps: begin with an auxiliary loss after so many, say. What autograd has recorded
between the loss and the units shows it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch

from meshwright_dtensor.errors import UnsupportedError, UsageError
from meshwright_pipeline._torch import pytree
from meshwright_pipeline.pytrees import tensors_of


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


_MARK = "meshwright_pipeline: of a unit"
_MOST = 512
"""Nodes that are looked at, nearest to the loss first."""
LossPath = tuple[str, ...]


def _notes(node: Any) -> dict[str, Any]:
    found: dict[str, Any] = node.metadata  # a property, which stubs have as a method
    return found


def mark_unit_output(output: Any) -> None:
    """What a unit has returned: nothing behind it is looked at, since modules may do otherwise with every batch."""
    for tensor in tensors_of(output):
        if tensor.grad_fn is not None:
            _notes(tensor.grad_fn)[_MARK] = True


def loss_path(loss: torch.Tensor) -> LossPath:
    """The operations between the units and the loss that autograd knows, by name."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, found = set(nodes), list[str]()
    for node in nodes:  # grows meanwhile
        if _MARK in _notes(node) or len(found) == _MOST:
            found.append("unit")
            continue
        found.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return tuple(found[:_MOST])


class LossPathCheck:
    """The ways of the first step, and whether later ones are the same."""

    def __init__(self) -> None:
        self._known: dict[tuple[bool, ...], LossPath] = {}

    def check(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """Look at the loss of one microbatch; parameters may be frozen meanwhile.

        Raises:
            UnsupportedError: it has been computed in another way than in the first step.
        """
        way = loss_path(loss)
        known = self._known.setdefault(tuple(p.requires_grad for p in model.parameters()), way)
        if known != way:
            raise UnsupportedError(
                "the code of the model that computes the loss does something else than in the first step with a batch of the same "
                "shapes, where the loss was found to add up over microbatches; set pipeline.microbatches to 1, or compute the loss "
                "outside of the model"
            )
