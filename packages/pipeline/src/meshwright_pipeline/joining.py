"""The results of microbatches as those of the whole batch, and gradients of the whole as those of microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from meshwright_pipeline.trees import leaves_of

Tensor = torch.Tensor


@dataclass(frozen=True)
class Joint:
    """How one leaf of a result comes together.

    Attributes:
        rows: the dim along which microbatches lie one after the other; None where they do not.
        means: the average over microbatches: a number.
    """

    rows: int | None = None
    means: bool = False

    @staticmethod
    def of(part: Any, whole: Any, count: int) -> Joint:
        """From the leaf of a microbatch, of which there are `count`, and that of the whole batch, both profiled."""
        if not isinstance(part, Tensor) or not isinstance(whole, Tensor) or count == 1:
            return Joint()
        if part.dim() == 0:
            return Joint(means=part.is_floating_point())
        grown = [
            dim
            for dim, size in enumerate(part.shape)
            if whole.dim() == part.dim() and whole.shape[dim] != size
        ]
        if len(grown) == 1 and whole.shape[grown[0]] == count * part.shape[grown[0]]:
            return Joint(rows=grown[0])
        return Joint()

    def join(self, parts: Sequence[Any]) -> Any:
        """The leaf for the whole batch; None for a tensor that belongs to no rows, and differs between microbatches."""
        first = parts[0]
        if not isinstance(first, Tensor) or len(parts) == 1:
            return parts[-1]
        if self.rows is not None:
            return torch.cat(list(parts), self.rows)
        if self.means:
            return sum(parts) / len(parts)
        return parts[-1] if all(torch.equal(part, first) for part in parts[1:]) else None

    def share(self, gradient: Tensor | None, index: int, count: int) -> Tensor | None:
        """The gradient of the leaf of one of `count` microbatches, from that of the whole."""
        if gradient is None or count == 1:
            return gradient
        if self.rows is not None:
            return gradient.chunk(count, self.rows)[index]
        if self.means:
            return gradient / count
        return gradient if index == count - 1 else None


def joints(part: Any, whole: Any, count: int) -> list[Joint]:
    """How the leaves of a result come together, from its profiles."""
    parts, wholes = leaves_of(part), leaves_of(whole)
    if len(parts) != len(wholes):
        return [Joint(means=isinstance(x, Tensor) and x.dim() == 0 and x.is_floating_point()) for x in parts]
    return [Joint.of(one, all_, count) for one, all_ in zip(parts, wholes, strict=True)]
