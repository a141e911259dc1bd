"""A candidate: one combination of degrees, evaluated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright_dtensor.plan import PlannedCollective, RecomputeRule
from meshwright_dtensor.strategy import CollectiveUse
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.rules import in_words


@dataclass
class Candidate:
    """What one combination of degrees costs.

    Args:
        degrees: mesh axis -> degree, outermost first.
        stage: what ranks along the axis zero share, 0 where they share nothing.
        searched: the axes whose placements were searched, outermost first.
        problem, placement: the search on those axes and its answer; None when no placement fits the memory.
        compute_seconds: of one step on one rank.
        bubble_seconds: a pipeline's rank waiting for others.
        exposed: mesh axes -> seconds of communication that add to the step.
        hidden: mesh axes -> seconds of communication that overlap with compute.
        optimizer_seconds: of the optimizer's step.
        memory: bytes by part on one rank.
        limit: bytes that may be predicted of one rank.
        allowed: bytes that one rank has.
        uses: collectives that strategies add to the placement's, each with the axes that it is along.
        fields: what strategies add to the plan.
        placements: parameter name -> mesh axis -> state, of parameters that strategies place themselves.
        apart: names of modules that strategies run themselves.
        notes: what strategies have to say of the model.
        stages: per stage (one without a pipeline), its forward and its backward pass as parts of the time that the whole
            model computes.
        between: what runs once between all forwards and all backwards, as part of the same time.
        point: what was decided before the placements.
        recompute: modules whose activations are not kept.
    """

    degrees: Mapping[str, int]
    searched: tuple[str, ...]
    problem: PlacementProblem
    placement: Placement
    compute_seconds: float
    exposed: Mapping[str, float]
    hidden: Mapping[str, float]
    optimizer_seconds: float
    memory: dict[str, int]
    limit: int
    allowed: int
    uses: list[tuple[str, CollectiveUse]] = field(default_factory=list)
    fields: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    placements: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    apart: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bubble_seconds: float = 0.0
    stages: tuple[tuple[float, float], ...] = ()
    between: float = 0.0
    point: Point = field(default_factory=Point)
    recompute: tuple[RecomputeRule, ...] = ()

    @property
    def collectives(self) -> list[PlannedCollective]:
        """The collectives that strategies add, as a plan names them."""
        return [
            PlannedCollective(
                axis=axes,
                kind=u.kind,
                nbytes=u.nbytes,
                count=u.count,
                phase=u.phase,
                module=u.module,
                why=u.why,
            )
            for axes, u in self.uses
        ]

    @property
    def exposed_seconds(self) -> float:
        """Communication that adds to the step."""
        return sum(self.exposed.values())

    @property
    def hidden_seconds(self) -> float:
        """Communication that overlaps with compute."""
        return sum(self.hidden.values())

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.compute_seconds + self.exposed_seconds + self.bubble_seconds + self.optimizer_seconds

    @property
    def total_bytes(self) -> int:
        """Bytes of one rank at the peak."""
        return sum(self.memory.values())

    @property
    def excess_bytes(self) -> int:
        """By how many bytes it does not fit; 0 when it does."""
        return max(0, self.total_bytes - self.limit)

    @property
    def bound(self) -> str:
        """What most of the step is spent on, and whether memory is nearly full."""
        parts = {
            "compute": self.compute_seconds,
            "communication": self.exposed_seconds,
            "bubble": self.bubble_seconds,
            "optimizer": self.optimizer_seconds,
        }
        largest = max(parts, key=lambda name: parts[name])
        full = self.allowed and self.total_bytes > 0.9 * self.allowed
        return f"{largest}, memory {100 * self.total_bytes / self.allowed:.0f}% full" if full else largest

    @property
    def name(self) -> str:
        """ "dp 2 x tp 4"."""
        said = {"zero": f" (stage {self.stage})"} if self.stage else {}
        rule = self.fields.get("pipeline")
        if rule is not None:
            said["pp"] = f" ({rule['schedule']}, {rule['microbatches']} microbatches)"
        parts = (f"{axis} {degree}{said.get(axis, '')}" for axis, degree in self.degrees.items())
        again = f", recompute {in_words(self.recompute)}" if self.recompute else ""
        return (" x ".join(parts) or "one rank") + again


def rank(candidate: Candidate) -> tuple[Any, ...]:
    """Fitting first, then fastest; equals by memory, then by fewer searched ranks, then by name."""
    return (
        candidate.excess_bytes > 0,
        round(candidate.step_seconds, 12),
        candidate.total_bytes,
        tuple(-d for d in candidate.degrees.values()),
        candidate.name,
    )


def human_seconds(seconds: float) -> str:
    """ "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
