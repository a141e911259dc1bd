"""One forward, one backward, over several stages a rank: a smaller bubble for more messages.

Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_pipeline.actions import Action, Schedule, Shape


class Interleaved(Schedule):
    """Microbatches go through the stages of a rank in groups of as many as there are ranks."""

    name: ClassVar[str] = "interleaved"
    stages_each: ClassVar[int] = 2

    def refusal(self, shape: Shape) -> str | None:
        """Microbatches in whole groups."""
        if shape.microbatches % shape.ranks:
            return (
                f"it takes microbatches in groups of {shape.ranks}, one for each rank, and {shape.microbatches} do not divide "
                "by that; change pipeline.microbatches"
            )
        return None

    def ahead(self, rank: int, shape: Shape) -> int:
        """Forwards that a rank runs before forwards and backwards take turns."""
        return (shape.each - 1) * shape.ranks + 2 * (shape.ranks - 1 - rank)

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        stages, total = self.own(rank, shape), shape.microbatches * shape.each
        last = len(stages) - 1

        def forward(step: int) -> Action:
            group, within = divmod(step, shape.ranks * shape.each)
            chunk, m = divmod(within, shape.ranks)
            return Action("F", stages[chunk], group * shape.ranks + m)

        def backward(step: int) -> Action:
            mirrored = forward(step)
            return Action("B", stages[last - stages.index(mirrored.stage)], mirrored.microbatch)

        ahead = min(total, self.ahead(rank, shape))
        found = [forward(step) for step in range(ahead)]
        for step in range(total):
            if step + ahead < total:
                found.append(forward(step + ahead))
            found.append(backward(step))
        return found
