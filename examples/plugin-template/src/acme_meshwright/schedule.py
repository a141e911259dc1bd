"""A schedule: two microbatches at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule import Action, Schedule, Shape


class Pairs(Schedule):
    """Microbatches 0 and 1 go forward through all stages and back, then 2 and 3, and so on."""

    name: ClassVar[str] = "acme-pairs"

    def refusal(self, shape: Shape) -> str | None:
        """It needs pairs."""
        if shape.microbatches % 2:
            return f"{shape.microbatches} microbatches do not make pairs; give an even number"
        return None

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """The actions of one rank, in order."""
        stages, order = self.own(rank, shape), []
        for first in range(0, shape.microbatches, 2):
            pair = (first, first + 1)
            order += [Action("F", stage, m) for stage in stages for m in pair]
            order += [Action("B", stage, m) for stage in reversed(stages) for m in pair]
        return order
