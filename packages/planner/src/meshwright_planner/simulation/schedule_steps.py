"""The order in which each rank of a pipeline runs its forwards and backwards, from the schedule that the plan names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover

PARTS: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5})
"""Kind of action -> part of the forward or backward pass that it is: "I" makes gradients of inputs, "W" of weights."""

WHOLE: Mapping[str, float] = MappingProxyType({**PARTS, "I": 1.0, "W": 0.0})
"""The same where modules run again: the first half of a backward does all of it."""


@dataclass(frozen=True)
class Shape:
    """The size of a pipeline, as schedules ask for it."""

    ranks: int
    stages: int
    microbatches: int

    @property
    def each(self) -> int:
        """Stages of one rank."""
        return self.stages // self.ranks


class _Action(Protocol):
    @property
    def kind(self) -> str: ...
    @property
    def stage(self) -> int: ...
    @property
    def microbatch(self) -> int: ...


@dataclass(frozen=True)
class Step:
    """One action of a rank.

    Args:
        kind: "F", "B", "I" or "W".
        stage, microbatch: of what.
        part: of the pass of the stage.
        needs: (kind, stage, microbatch) of the message it waits for.
        gives: of the message it sends.
        local: that message stays on the rank.
    """

    kind: str
    stage: int
    microbatch: int
    part: float = 1.0
    needs: tuple[str, int, int] | None = None
    gives: tuple[str, int, int] | None = None
    local: bool = False

    @property
    def needs_what(self) -> str:
        """What it waits for, for people."""
        return f"{'activations' if self.kind == 'F' else 'gradients'} for stage {self.stage}"

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def steps_of(plan: ParallelPlan, host: PluginHost | None = None) -> list[list[Step]]:
    """Per rank along pp, what it does in one step; one forward and one backward without a pipeline.

    Raises:
        PluginError: no installed schedule has the plan's name.
        UsageError: the schedule does what a replay does not know.
    """
    rule = plan.pipeline
    if rule is None:
        return [[Step("F", 0, 0), Step("B", 0, 0)]]
    found: Any = (host or discover()).get(ScheduleSpec, rule.schedule).load()
    schedule = found() if isinstance(found, type) else found
    shape = Shape(plan.degree("pp"), len(rule.stages), rule.microbatches)
    parts = WHOLE if plan.recompute else PARTS
    ranks = [
        [_step(action, schedule, shape, parts) for action in schedule.actions(r, shape)]
        for r in range(shape.ranks)
    ]
    if rule.loss == "batch":  # backwards follow when the loss has been made, behind all forwards
        return [sorted(own, key=lambda step: step.kind != "F") for own in ranks]
    return ranks


def _step(action: _Action, schedule: Any, shape: Shape, parts: Mapping[str, float]) -> Step:
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind not in PARTS:
        raise UsageError(
            f"schedule {schedule.name!r} has actions of kind {kind!r}, which a replay does not know "
            f"(it knows {', '.join(PARTS)})"
        )
    if kind == "W":
        return Step(kind, stage, microbatch, parts[kind])
    forward = kind == "F"
    toward = stage + 1 if forward else stage - 1
    letter = "F" if forward else "B"
    inner = stage > 0 if forward else stage < shape.stages - 1
    handed = 0 <= toward < shape.stages
    return Step(
        kind,
        stage,
        microbatch,
        parts[kind],
        needs=(letter, stage, microbatch) if inner else None,
        gives=(letter, toward, microbatch) if handed else None,
        local=handed and schedule.owner(toward, shape) == schedule.owner(stage, shape),
    )
