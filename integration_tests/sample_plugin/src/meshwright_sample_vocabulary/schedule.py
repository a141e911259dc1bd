"""A pipeline schedule: one microbatch after the other, so that a rank holds the activations of one alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_pipeline import Action, Schedule, Shape


class OneByOne(Schedule):
    """Each microbatch goes through all stages and back before the next begins: the least memory, the largest bubble."""

    name: ClassVar[str] = "one-by-one"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        stages = self.own(rank, shape)
        return [
            action
            for m in range(shape.microbatches)
            for action in (
                *(Action("F", stage, m) for stage in stages),
                *(Action("B", stage, m) for stage in reversed(stages)),
            )
        ]
