"""One forward, one backward: 1F1B, interleaved 1F1B over several stages per rank, and zero bubble with split backwards.

Sources: Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019 (with a flush each step);
Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", 2021, 2.2;
Qi et al., "Zero Bubble Pipeline Parallelism", 2023: the schedule ZB-H1, over several stages per rank.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape


class OneForwardOneBackward(Schedule):
    """After a warm-up, forwards and backwards take turns: stage s of n holds at most n - s microbatches."""

    name: ClassVar[str] = "1f1b"

    def refusal(self, shape: Shape) -> str | None:
        """One stage per rank."""
        if shape.each != 1:
            return f"it runs one stage per rank, and the plan has {shape.each}; use interleaved, or as many stages as ranks"
        return None

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
        count = shape.microbatches
        warmup = min(count, shape.ranks - 1 - rank)
        actions = [Action("F", rank, m) for m in range(warmup)]
        for m in range(count):
            if m + warmup < count:
                actions.append(Action("F", rank, m + warmup))
            actions.append(Action("B", rank, m))
        return actions


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
        stages, total = self.own(rank, shape), shape.microbatches * shape.each
        groups = (range(m, m + shape.ranks) for m in range(0, shape.microbatches, shape.ranks))
        order = [(stage, m) for group in groups for stage in stages for m in group]
        mirror = dict(zip(stages, reversed(stages), strict=True))
        forwards = [Action("F", stage, m) for stage, m in order]
        backwards = [Action("B", mirror[stage], m) for stage, m in order]
        warmup = min(total, self.warmup(rank, shape))
        turns = itertools.chain.from_iterable(zip(forwards[warmup:], backwards, strict=False))
        return [*forwards[:warmup], *turns, *backwards[total - warmup :]]


class ZeroBubble(Interleaved):
    """Rank r defers the weight gradients of r microbatches: every rank then holds as many as the first of 1F1B."""

    name: ClassVar[str] = "zero-bubble"

    def warmup(self, rank: int, shape: Shape) -> int:
        """Fewer forwards than interleaved 1F1B: half a backward takes as long as a forward."""
        return (shape.each - 1) * shape.ranks + shape.ranks - 1 - rank

    def actions(self, rank: int, shape: Shape) -> Sequence[Action]:
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
