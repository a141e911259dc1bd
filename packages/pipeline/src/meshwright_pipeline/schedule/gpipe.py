"""All forwards, then all backwards.

Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism", 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class GPipe(Schedule):
    """Every stage holds the activations of all microbatches. With several stages per rank it runs breadth first."""

    name: ClassVar[str] = "gpipe"

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        stages, microbatches = self.own(rank, shape), range(shape.microbatches)
        forwards = [Action("F", stage, m) for stage in stages for m in microbatches]
        return [*forwards, *(Action("B", stage, m) for stage in reversed(stages) for m in microbatches)]
