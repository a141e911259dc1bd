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
from meshwright_pipeline.runtime.executor import StepOutcome, writable
from meshwright_pipeline.runtime.stage import Stage
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Label, Profile

Tensor = torch.Tensor


@dataclass(frozen=True)
class Joint:
    """How one value is joined.

    Attributes:
        rows: the dim along which microbatches are concatenated; None where all have the same value.
    """

    rows: int | None = None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The value for the whole batch."""
        if self.rows is None or len(parts) == 1:
            # the code may write to it in place, and autograd may have saved it
            return parts[-1].clone()
        return torch.cat(list(parts), self.rows)


def joint_of(label: Label, part: Profile, whole: Profile, count: int) -> Joint:
    """How a unit output is joined, from the profiles of one of `count` microbatches and of the batch.

    Raises:
        UnsupportedError: the value for the whole batch does not follow from those of microbatches.
    """
    if count == 1:
        return Joint()
    of_part, of_whole = part.leaf(label), whole.leaf(label)
    if isinstance(of_part, Tensor) and isinstance(of_whole, Tensor) and of_part.dim() == of_whole.dim():
        grown = differing_dims(of_part, of_whole)
        if len(grown) == 1 and of_whole.shape[grown[0]] == count * of_part.shape[grown[0]]:
            return Joint(rows=grown[0])
        if not grown and label[:2] not in whole.of_batch:
            return Joint()
    unit, _, path, place = label
    where = f"{unit}.{path}" if path else unit
    is_tensor = isinstance(of_part, Tensor)
    what = f"{list(of_part.shape)} for {count} microbatches each" if is_tensor else type(of_part).__name__
    raise UnsupportedError(
        f"module {where!r} returns a value without rows of the batch (element {place}: {what}), and the result of the model "
        "depends on it: its value for the whole batch cannot be computed from microbatches; set pipeline.microbatches to 1, or "
        "compute it outside of the module, from values that have rows"
    )


@dataclass
class TailRun:
    """A tail that has run.

    Attributes:
        leaves: microbatch -> this rank's parts of the unit outputs that the tail took.
    """

    leaves: dict[int, list[Tensor]]

    def backward(
        self, outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> dict[int, list[Tensor | None]]:
        """Microbatch -> gradients of the leaves that require one, from those of `outputs`."""
        pairs = [(t, g) for t, g in zip(outputs, gradients, strict=True) if g is not None and t.requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        leaf_gradients: dict[int, list[Tensor | None]] = {}
        for microbatch, leaves in self.leaves.items():
            leaf_gradients[microbatch] = [leaf.grad for leaf in leaves if leaf.requires_grad]
            for leaf in leaves:
                leaf.grad = None
        return leaf_gradients


class Tail:
    """Runs the code after the last unit.

    Args:
        stage: an index after the last stage: a forward in which all units are skipped.
        joints: how each unit output is joined, in the order of `stage.cut.final`.
        mesh: of the last stage; None where values are ordinary tensors.
    """

    def __init__(self, stage: Stage, joints: Sequence[Joint], mesh: DeviceMesh | None) -> None:
        self.stage, self.joints, self.mesh = stage, tuple(joints), mesh

    def run(self, whole: Call, outcome: StepOutcome) -> tuple[TailRun, Any]:
        """Run it on the batch `whole`, after the forwards of a step. Returns also the result of the model.

        Its gradients stop at leaves of its own, where gradients are on.
        """
        training = torch.is_grad_enabled()
        leaves: dict[int, list[Tensor]] = {}
        for microbatch in sorted(outcome.unit_outputs):
            leaves[microbatch] = [local.detach() for local in outcome.unit_outputs[microbatch]]
            for leaf, spec in zip(leaves[microbatch], outcome.specs, strict=True):
                leaf.requires_grad_(training and spec.differentiable)
        received: dict[Label, Tensor] = {}
        for place, (label, spec, joint) in enumerate(
            zip(self.stage.cut.final, outcome.specs, self.joints, strict=True)
        ):
            parts = [of_microbatch[place] for of_microbatch in leaves.values()]
            received[label] = joint.join(
                [spec.value(writable(leaf) if leaf.requires_grad else leaf, self.mesh) for leaf in parts]
            )
        _, result = self.stage.run(*whole, received)
        return TailRun(leaves), result


def joints_of(labels: Sequence[Label], part: Profile, whole: Profile, count: int) -> list[Joint]:
    """How the unit outputs that the tail takes are joined.

    Raises:
        UnsupportedError: one cannot be joined, or a microbatch is computed in another way than the batch.
    """
    if part.order != whole.order or part.final != whole.final:
        raise UnsupportedError(
            f"the model calls other modules for the whole batch than for one of {count} microbatches, or uses other results of "
            "them; set pipeline.microbatches to 1, or make the model call the same modules for any number of rows"
        )
    return [joint_of(label, part, whole, count) for label in labels]
