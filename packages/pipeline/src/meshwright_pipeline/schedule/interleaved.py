"""Interleaved 1F1B: several stages per rank, a smaller bubble and more messages.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, 2.2.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class Interleaved(Schedule):
    """Microbatches go through the stages of a rank in groups, one microbatch per rank."""

    name: ClassVar[str] = "interleaved"
    stages_each: ClassVar[int] = 2
    most_each: ClassVar[int] = 4

    def refusal(self, shape: Shape) -> str | None:
        """Microbatches must form whole groups."""
        if shape.microbatches % shape.ranks:
            return (
                f"it takes microbatches in groups of {shape.ranks}, one for each rank, and {shape.microbatches} is not a multiple "
                "of that; change pipeline.microbatches"
            )
        return None

    def warmup(self, rank: int, shape: Shape) -> int:
        """Forwards of a rank before forwards and backwards take turns."""
        return (shape.each - 1) * shape.ranks + 2 * (shape.ranks - 1 - rank)

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        stages, total = self.own(rank, shape), shape.microbatches * shape.each
        groups = range(0, shape.microbatches, shape.ranks)
        order = [
            (stage, m) for group in groups for stage in stages for m in range(group, group + shape.ranks)
        ]
        mirror = dict(zip(stages, reversed(stages), strict=True))
        forwards = [Action("F", stage, m) for stage, m in order]
        backwards = [Action("B", mirror[stage], m) for stage, m in order]
        warmup = min(total, self.warmup(rank, shape))
        turns = itertools.chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return [*forwards[:warmup], *turns, *backwards[total - warmup :]]
