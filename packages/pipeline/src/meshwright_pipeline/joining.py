"""What units return for microbatches, as what they return for the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshwright_dtensor.errors import UnsupportedError
from meshwright_pipeline.interception import Label
from meshwright_pipeline.profiling import Profile
from meshwright_pipeline.trees import unlike_dims

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
        grown = unlike_dims(one, every)
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
