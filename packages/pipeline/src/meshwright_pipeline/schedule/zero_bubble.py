"""Interleaved 1f1b whose backwards are split: gradients of weights, for which nobody waits, fill the bubble.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023: the schedule ZB-H1, over several stages a rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Shape
from meshwright_pipeline.schedule.interleaved import Interleaved


class ZeroBubble(Interleaved):
    """Rank r puts off the gradients of weights of r microbatches: every rank then holds as many as the first of 1f1b."""

    name: ClassVar[str] = "zero-bubble"

    def ahead(self, rank: int, shape: Shape) -> int:
        """One trip of a forward less than interleaved 1f1b: the way back is as fast as the way there."""
        return (shape.each - 1) * shape.ranks + shape.ranks - 1 - rank

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        found: list[Action] = []
        later: deque[Action] = deque()
        for action in super().actions(rank, shape):
            if action.kind == "F":
                found.append(action)
                continue
            found.append(Action("I", action.stage, action.microbatch))
            later.append(Action("W", action.stage, action.microbatch))
            if len(later) > rank:
                found.append(later.popleft())
        return [*found, *later]
