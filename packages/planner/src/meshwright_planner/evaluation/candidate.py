"""A candidate: one configuration with its placements and its predicted cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.strategy import CollectiveUse
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.memory.parts import Sizes, parameter_bytes
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.rules import in_words


@dataclass
class Candidate:
    """One configuration with its placements and its predicted cost.

    Args:
        degrees: mesh axis -> degree, outermost first.
        stage: ZeRO stage, 0 where ranks share no training state.
        searched: the axes whose placements were searched, outermost first.
        problem, placement: the placement problem on those axes, and its solution.
        compute_seconds: of one step on one rank.
        bubble_seconds: time that a rank of a pipeline waits for others.
        exposed: mesh axes -> seconds of communication that add to the step.
        hidden: mesh axes -> seconds of communication that overlap with compute.
        memory: bytes by part on one rank.
        limit: bytes that may be predicted for one rank.
        allowed: bytes that one rank has.
        uses: collectives that strategies add to those of the placement, each with its axes.
        fields: fields that strategies add to the plan.
        placements: parameter name -> mesh axis -> state, of parameters that strategies place themselves.
        strategy_modules: names of modules that strategies run themselves.
        notes: notes of strategies for the plan.
        stages: per stage (one without a pipeline), its forward and its backward pass as parts of the compute time of the
            whole model.
        between: what runs once between all forwards and all backwards, as part of the same time.
        inside: searched axis -> seconds of its collectives inside of the forward and backward of one microbatch.
        stage_communication, between_communication: as `stages` and `between`, parts of the seconds in `inside`; () and 0 where no
            strategy divides the model.
        recompute: rules of the modules that run again in the backward pass.
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
    strategy_modules: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    bubble_seconds: float = 0.0
    stages: tuple[tuple[float, float], ...] = ()
    between: float = 0.0
    inside: Mapping[str, float] = field(default_factory=dict)
    stage_communication: tuple[tuple[float, float], ...] = ()
    between_communication: float = 0.0
    point: Point = field(default_factory=Point)
    recompute: tuple[RecomputeRule, ...] = ()

    @property
    def exposed_seconds(self) -> float:
        """Communication that adds to the step."""
        return sum(self.exposed.values())

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
        """Bytes by which it exceeds the limit; 0 where it fits."""
        return max(0, self.total_bytes - self.limit)

    def least_bytes(self, sizes: Sizes) -> float:
        """The least bytes that any placement on the searched axes can reach: with everything sharded there."""
        problem, placement = self.problem, self.placement
        if not self.searched:
            return float(self.total_bytes)
        degree = math.prod(self.point.degree(axis) for axis in self.searched)
        stored = kept = 1 / degree
        # a stage of a pipeline may hold more or less sharded parameters than the model on average
        if self.fields.get("pipeline") is None:
            now, _ = parameter_bytes(sizes, problem, placement)
            stored = min(1.0, sum(size for _, size, _ in sizes.parameters) / degree / now) if now else 1.0
            undivided = problem.replicated().saved_bytes * placement.times
            kept = min(1.0, undivided / degree / placement.saved_bytes) if placement.saved_bytes else 1.0
        factors = {"parameters": stored, "gradients": stored, "optimizer": stored, "activations": kept}
        return sum(size * factors.get(part, 1 / degree) for part, size in self.memory.items())

    @property
    def bound(self) -> str:
        """The largest part of the step, and whether memory is nearly full."""
        seconds = self.compute_seconds, self.exposed_seconds, self.bubble_seconds, self.optimizer_seconds
        largest = ("compute", "communication", "bubble", "optimizer")[seconds.index(max(seconds))]
        full = self.allowed and self.total_bytes > 0.9 * self.allowed
        return f"{largest}, memory {100 * self.total_bytes / self.allowed:.0f}% full" if full else largest

    @property
    def name(self) -> str:
        """ "dp 2 x tp 4"."""
        rule = self.fields.get("pipeline")
        pipeline = None if rule is None else (rule["schedule"], rule["microbatches"])
        return configuration_name(self.degrees, self.stage, pipeline, self.recompute)


def configuration_name(
    degrees: Mapping[str, int], stage: int, pipeline: tuple[str, int] | None, rules: Iterable[RecomputeRule]
) -> str:
    """ "dp 2 x zero 2 (stage 3) x tp 4"; `pipeline`: its schedule and microbatches."""
    details = {"zero": f" (stage {stage})"} if stage else {}
    if pipeline is not None:
        details["pp"] = f" ({pipeline[0]}, {count_of(pipeline[1], 'microbatch')})"
    axes = (f"{axis} {degree}{details.get(axis, '')}" for axis, degree in degrees.items())
    recomputed = in_words(rules)
    return (" x ".join(axes) or "one rank") + (f", recompute {recomputed}" if recomputed else "")


def rank(candidate: Candidate) -> tuple[Any, ...]:
    """Sort key: candidates that fit first, then by time, memory, degrees and name."""
    seconds, degrees = round(candidate.step_seconds, 12), tuple(-d for d in candidate.degrees.values())
    return candidate.excess_bytes > 0, seconds, candidate.total_bytes, degrees, candidate.name


def estimated(candidate: Candidate) -> tuple[Any, ...]:
    """As `rank`, but among candidates that do not fit, those that exceed the memory least come first."""
    return (candidate.excess_bytes, *rank(candidate)[1:])
