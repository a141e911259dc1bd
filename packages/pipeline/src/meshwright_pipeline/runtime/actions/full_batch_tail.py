"""The code after the last unit, run once on the whole batch: losses, means and counts are then those of one device.

The unit outputs of all microbatches are joined to those of the whole batch. Whatever the code computes from them (a mean
over targets that count, a product of means, a matrix of all pairs of rows), it computes for the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline.pytrees import differing_dims
from meshwright_pipeline.runtime.actions.executor import StepOutcome, writable
from meshwright_pipeline.runtime.actions.stage import Stage
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Label, Profile

Tensor = torch.Tensor


def _row_dim(label: Label, part: Profile, whole: Profile, count: int) -> int | None:
    """See `row_dims`, of one unit output."""
    if count == 1:
        return None
    of_part, of_whole = part.leaf(label), whole.leaf(label)
    if isinstance(of_part, Tensor) and isinstance(of_whole, Tensor) and of_part.dim() == of_whole.dim():
        grown = differing_dims(of_part, of_whole)
        if len(grown) == 1 and of_whole.shape[grown[0]] == count * of_part.shape[grown[0]]:
            return grown[0]
        if not grown and label[:2] not in whole.of_batch:
            return None
    unit, _, path, place = label
    where = f"{unit}.{path}" if path else unit
    is_tensor = isinstance(of_part, Tensor)
    what = f"{list(of_part.shape)} for {count} microbatches each" if is_tensor else type(of_part).__name__
    raise UnsupportedError(
        f"module {where!r} returns a value without rows of the batch (element {place}: {what}), and the result of the model "
        "depends on it: its value for the whole batch cannot be computed from microbatches; set pipeline.microbatches to 1, or "
        "compute it outside of the module, from values that have rows"
    )


TailLeaves = dict[int, list[Tensor]]
"""Microbatch -> this rank's parts of the unit outputs that the code took."""


@dataclass(frozen=True)
class Tail:
    """The code after the last unit.

    `stage`: an index after the last stage, a forward in which all units are skipped. `row_dims`: how each unit output is joined,
    in the order of `stage.cut.final`. `mesh`: of the last stage; None where values are ordinary tensors.
    """

    stage: Stage
    row_dims: Sequence[int | None]
    mesh: DeviceMesh | None

    def run(self, whole: Call, outcome: StepOutcome) -> tuple[TailLeaves, Any]:
        """Run it on the batch `whole`, after the forwards. Returns leaves, at which its gradients stop, and the model's result."""
        training = torch.is_grad_enabled()
        leaves: TailLeaves = {}
        for microbatch in sorted(outcome.unit_outputs):
            leaves[microbatch] = [local.detach() for local in outcome.unit_outputs[microbatch]]
            for leaf, spec in zip(leaves[microbatch], outcome.specs, strict=True):
                leaf.requires_grad_(training and spec.differentiable)
        received: dict[Label, Tensor] = {}
        joined = zip(self.stage.cut.final, outcome.specs, self.row_dims, zip(*leaves.values()), strict=True)
        for label, spec, dim, parts in joined:
            values = [spec.value(writable(p) if p.requires_grad else p, self.mesh) for p in parts]
            # not the part itself: the code may write to it in place, and autograd may have saved it
            if dim is None or len(values) == 1:
                received[label] = values[-1].clone()
                continue
            value, rows = torch.cat(values, dim), self.stage.profile.leaf(label).shape[dim]
            # the last microbatches may have rows that are not in the batch
            received[label] = value if value.shape[dim] == rows else value.narrow(dim, 0, rows).clone()
        _, result = self.stage.run(whole, received)
        return leaves, result


def tail_backward(
    tail_leaves: TailLeaves, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
) -> dict[int, list[Tensor | None]]:
    """Microbatch -> gradients of the leaves that require one, from those of `outputs`."""
    pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None and t.requires_grad]
    if pairs:
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
    leaf_gradients: dict[int, list[Tensor | None]] = {}
    for microbatch, leaves in tail_leaves.items():
        leaf_gradients[microbatch] = [leaf.grad for leaf in leaves if leaf.requires_grad]
        for leaf in leaves:
            leaf.grad = None
    return leaf_gradients


def row_dims(labels: Sequence[Label], part: Profile, whole: Profile, count: int) -> list[int | None]:
    """For each unit output that the code takes, the dim along which those of microbatches are concatenated; None where all
    have the same value. From the profiles of one of `count` microbatches and of the batch.

    Raises UnsupportedError: one cannot be joined, or a microbatch is computed in another way than the batch.
    """
    if part.order != whole.order or part.final != whole.final:
        raise UnsupportedError(
            f"the model calls other modules for the whole batch than for one of {count} microbatches, or uses other results of "
            "them; set pipeline.microbatches to 1, or make the model call the same modules for any number of rows"
        )
    return [_row_dim(label, part, whole, count) for label in labels]
