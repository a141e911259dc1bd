"""Checks that later steps compute the loss by the same operations as the first step.

A model may change between steps, for example add an auxiliary loss after some of them. The proof that the loss is additive
then no longer holds. The autograd graph between the loss and the units shows the change.
"""

from __future__ import annotations

from typing import Any

import torch

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline.pytrees import tensors_of

_MARK = "meshwright_pipeline: of a unit"
_MOST = 512
"""Autograd nodes that are compared, nearest to the loss first."""
LossPath = tuple[str, ...]


def _metadata(node: Any) -> dict[str, Any]:
    # a property, which torch's stubs declare as a method
    metadata: dict[str, Any] = node.metadata
    return metadata


def mark_unit_output(output: Any) -> None:
    """Mark the output of a unit. The graph inside units is not compared: it may differ between batches."""
    for tensor in tensors_of(output):
        if tensor.grad_fn is not None:
            _metadata(tensor.grad_fn)[_MARK] = True


def loss_path(loss: torch.Tensor) -> LossPath:
    """Names of the autograd nodes between the units and the loss."""
    nodes = [] if loss.grad_fn is None else [loss.grad_fn]
    seen, names = set(nodes), list[str]()
    # the list grows in the loop
    for node in nodes:
        if _MARK in _metadata(node) or len(names) == _MOST:
            names.append("unit")
            continue
        names.append(node.name())
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                nodes.append(following)
    return tuple(names[:_MOST])


class LossPathCheck:
    """Compares the loss path of later steps with that of the first one, for each set of trainable parameters."""

    def __init__(self) -> None:
        self._paths: dict[tuple[bool, ...], LossPath] = {}

    def check(self, model: torch.nn.Module, loss: torch.Tensor) -> None:
        """Check the loss of one microbatch.

        Raises:
            UnsupportedError: it was computed by other operations than in the first step.
        """
        path = loss_path(loss)
        first = self._paths.setdefault(tuple(p.requires_grad for p in model.parameters()), path)
        if first != path:
            raise UnsupportedError(
                "the code that computes the loss runs other operations than in the first step with a batch of the same shapes. "
                "For those, the loss was proven additive over microbatches. Set pipeline.microbatches to 1, or compute the loss "
                "outside of the model"
            )
