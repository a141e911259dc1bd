"""Interleaved 1F1B with split backwards: gradients of weights, which no stage waits for, fill the bubble.

Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023: the schedule ZB-H1, over several stages per rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Shape
from meshwright_pipeline.schedule.interleaved import Interleaved


class ZeroBubble(Interleaved):
    """Rank r defers the weight gradients of r microbatches: every rank then holds as many as the first of 1F1B."""

    name: ClassVar[str] = "zero-bubble"

    def warmup(self, rank: int, shape: Shape) -> int:
        """Fewer forwards than interleaved 1F1B: half a backward takes as long as a forward."""
        return (shape.each - 1) * shape.ranks + shape.ranks - 1 - rank

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        """See Schedule."""
        actions: list[Action] = []
        deferred: deque[Action] = deque()
        for action in super().actions(rank, shape):
            if action.kind == "F":
                actions.append(action)
                continue
            actions.append(Action("I", action.stage, action.microbatch))
            deferred.append(Action("W", action.stage, action.microbatch))
            if len(deferred) > rank:
                actions.append(deferred.popleft())
        return [*actions, *deferred]
