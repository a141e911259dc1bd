"""What units return for microbatches, as what they return for the whole batch.

What a model does behind its last unit, once for the whole batch: losses, means, counts are those of one device then.

The units' results for all microbatches are put together, row behind row. Whatever the code behind the units makes of them
(a mean over targets that count, a sum, a product of means, a matrix of rows with rows), it makes of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline.pytrees import differing_dims
from meshwright_pipeline.runtime.executor import Step, arrived
from meshwright_pipeline.runtime.stage import Stage
from meshwright_pipeline.trace.microbatch import Call
from meshwright_pipeline.trace.profile import Label, Profile

Tensor = torch.Tensor


@dataclass(frozen=True)
class Joint:
    """How one value comes together.

    Attributes:
        rows: the dim along which microbatches lie one after the other; None where they have the same value.
    """

    rows: int | None = None

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The value for the whole batch."""
        if self.rows is None or len(parts) == 1:
            return parts[-1].clone()  # code may change it in place, and autograd have kept it
        return torch.cat(list(parts), self.rows)


def joint(label: Label, part: Profile, whole: Profile, count: int) -> Joint:
    """Of what a label stands for, from the profiles of a microbatch, of which there are `count`, and of the batch.

    Raises:
        UnsupportedError: the value of the whole batch does not follow from those of microbatches.
    """
    if count == 1:
        return Joint()
    one, every = part.leaf(label), whole.leaf(label)
    if isinstance(one, Tensor) and isinstance(every, Tensor) and one.dim() == every.dim():
        grown = differing_dims(one, every)
        if len(grown) == 1 and every.shape[grown[0]] == count * one.shape[grown[0]]:
            return Joint(rows=grown[0])
        if not grown and label[:2] not in whole.of_batch:
            return Joint()
    unit, _, path, place = label
    where = f"{unit}.{path}" if path else unit
    what = (
        f"{list(one.shape)} for {count} microbatches each" if isinstance(one, Tensor) else type(one).__name__
    )
    raise UnsupportedError(
        f"module {where!r} returns a value without rows of the batch (element {place}: {what}), and the result of the model "
        "takes it: what it is for the whole batch cannot be known from microbatches; set pipeline.microbatches to 1, or compute "
        "it outside of the module, from values that have rows"
    )


@dataclass
class Ran:
    """A tail that has run.

    Attributes:
        result: of the model.
        leaves: microbatch -> this rank's parts of what the tail took of the units.
    """

    result: Any
    leaves: dict[int, list[Tensor]]

    def back(
        self, made: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> dict[int, list[Tensor | None]]:
        """Microbatch -> gradients of the leaves that require one, from those of what was `made` of the result."""
        pairs = [(t, g) for t, g in zip(made, gradients, strict=True) if g is not None and t.requires_grad]
        if pairs:
            torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])
        found: dict[int, list[Tensor | None]] = {}
        for microbatch, leaves in self.leaves.items():
            found[microbatch] = [leaf.grad for leaf in leaves if leaf.requires_grad]
            for leaf in leaves:
                leaf.grad = None
        return found


class Tail:
    """Runs it.

    Args:
        stage: behind the last one: a forward in which all units are skipped.
        joints: how what it takes of the units comes together, in the order of `stage.cut.final`.
        mesh: of the last stage, None where values are ordinary tensors.
    """

    def __init__(self, stage: Stage, joints: Sequence[Joint], mesh: DeviceMesh | None) -> None:
        self.stage, self.joints, self.mesh = stage, tuple(joints), mesh

    def run(self, whole: Call, step: Step) -> Ran:
        """Run it on the batch `whole`, behind the forwards of `step`; gradients are kept apart where they are on."""
        training = torch.is_grad_enabled()
        leaves: dict[int, list[Tensor]] = {}
        for microbatch in sorted(step.behind):
            own = [local.detach() for local in step.behind[microbatch]]
            for leaf, one in zip(own, step.wire, strict=True):
                leaf.requires_grad_(training and one.differentiable)
            leaves[microbatch] = own
        received: dict[Label, Tensor] = {}
        for place, (label, one, way) in enumerate(
            zip(self.stage.cut.final, step.wire, self.joints, strict=True)
        ):
            parts = [own[place] for own in leaves.values()]
            received[label] = way.join(
                [one.value(arrived(leaf) if leaf.requires_grad else leaf, self.mesh) for leaf in parts]
            )
        _, result = self.stage.run(*whole, received)
        return Ran(result, leaves)


def joints_of(labels: Sequence[Label], part: Profile, whole: Profile, count: int) -> list[Joint]:
    """How what the tail takes of the units comes together.

    Raises:
        UnsupportedError: it does not, or a microbatch is computed in another way than the batch.
    """
    if part.order != whole.order or part.final != whole.final:
        raise UnsupportedError(
            f"the model calls other modules for the whole batch than for one of {count} microbatches, or takes other results of "
            "them; set pipeline.microbatches to 1, or make what it does the same for any number of rows"
        )
    return [joint(label, part, whole, count) for label in labels]
