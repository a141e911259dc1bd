"""The order in which each rank of a pipeline runs its forwards and backwards, and the messages between stages.

Each forward and backward is cut where collectives between replicas are joined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Action, ForwardsFirst, Schedule, Shape
from meshwright_planner.simulation.events import Join, Joins, Operation, Wait, Work

PARTS: Mapping[str, float] = MappingProxyType({"F": 1.0, "B": 1.0, "I": 0.5, "W": 0.5})
"""Kind of action -> its part of a whole forward or backward pass."""

PARTS_RECOMPUTED: Mapping[str, float] = MappingProxyType({**PARTS, "I": 1.0, "W": 0.0})
"""The same with recomputation: the first half of a backward then does all of it."""


@dataclass(frozen=True)
class Step:
    """One action of a rank.

    Args:
        kind: "F", "B", "I" or "W".
        stage, microbatch: see Action.
        part: its part of the compute of a whole forward or backward pass of the stage.
        needs: (kind, stage, microbatch) of the message that it waits for.
        gives: the same of the message that it sends.
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
    def communicates(self) -> bool:
        """Whether it runs the collectives inside of the pass; weight gradients need none."""
        return self.kind != "W"

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch} of stage {self.stage}"


def steps_of(plan: ParallelPlan, host: PluginHost | None = None) -> list[list[Step]]:
    """The actions of each rank along pp in one step; without a pipeline, one forward and one backward.

    Raises:
        PluginError: no installed schedule has the plan's name.
        UsageError: the schedule is no Schedule, or has actions of an unknown kind.
    """
    rule = plan.pipeline
    if rule is None:
        return [[Step("F", 0, 0), Step("B", 0, 0)]]
    schedule = schedule_named(rule.schedule, host)
    if rule.loss == "batch":
        schedule = ForwardsFirst(schedule)
    shape = Shape(plan.degree("pp"), len(rule.stages), rule.microbatches)
    parts = PARTS_RECOMPUTED if plan.recompute else PARTS
    actions = (schedule.actions(rank, shape) for rank in range(shape.ranks))
    return [[_step(action, schedule, shape, parts) for action in row] for row in actions]


def _step(action: Action, schedule: Schedule, shape: Shape, parts: Mapping[str, float]) -> Step:
    kind, stage, microbatch = action
    if kind not in PARTS:
        text = f"schedule {schedule.name!r} has actions of kind {kind!r}; the kinds of actions are {', '.join(PARTS)}"
        raise UsageError(text)
    message, after = ("F", stage + 1) if kind == "F" else ("B", stage - 1)
    receives, sends = (kind != "W" and 0 <= s < shape.stages for s in (2 * stage - after, after))
    return Step(
        *action,
        parts[kind],
        needs=(message, stage, microbatch) if receives else None,
        gives=(message, after, microbatch) if sends else None,
        local=sends and schedule.owner(after, shape) == schedule.owner(stage, shape),
    )


@dataclass(frozen=True)
class Gathers:
    """The all-gathers of parameters of one rank in a training step.

    Args:
        blocks: phase -> all-gathers of parameters in repeated blocks, in order, of all passes.
        outside: all-gathers of the other parameters, in forward passes.
        steps: of the rank.
        last: the last stage.
        every_pass: every pass gathers (ZeRO 3), not only the first of a stage.
    """

    blocks: Mapping[str, Sequence[Join]]
    outside: Sequence[Join]
    steps: Sequence[Step]
    last: int
    every_pass: bool

    @cached_property
    def _passes(self) -> dict[str, list[int]]:
        """Phase -> the steps that gather."""
        passes: dict[str, list[int]] = {}
        for phase, kinds in (("forward", "F"), ("backward", "BI")):
            indices = [i for i, step in enumerate(self.steps) if step.kind in kinds]
            first = {self.steps[i].stage: i for i in reversed(indices)}
            passes[phase] = indices if self.every_pass else sorted(first.values())
        return passes

    def of(self, index: int) -> Joins:
        """The all-gathers of one step, in order, each with its weight in the compute that follows; 0 before the blocks."""
        step = self.steps[index]
        phase = "forward" if step.kind == "F" else "backward"
        blocks = [(1.0, join) for join in _share(self.blocks[phase], self._passes[phase], index)]
        if phase == "backward":
            return blocks
        # the embedding is needed before the blocks; a rank without it has the head, after the blocks
        stage = 0 if any(step.stage == 0 for step in self.steps) else self.last
        indices = [i for i in self._passes[phase] if self.steps[i].stage == stage]
        outside = _share(self.outside, indices, index)
        if stage == 0:
            return [*((0.0, join) for join in outside), *blocks]
        return [*blocks, *((1.0, join) for join in outside)]


def _share(joins: Sequence[Join], steps: Sequence[int], index: int) -> Sequence[Join]:
    """The collectives of step `index`, when all are spread evenly over `steps`."""
    if index not in steps:
        return ()
    place, count = steps.index(index), len(steps)
    return joins[place * len(joins) // count : (place + 1) * len(joins) // count]


def wait_for(join: Join) -> Wait:
    """Wait for a collective and those before it on its stream."""
    return Wait(join.group, join.stream, _named(join))


def _named(join: Join) -> str:
    axis, _, kind = join.stream.partition(":")
    return f"the parameters that {axis} shares" if kind == "gather" else f"the sum of gradients over {axis}"


def _begun(join: Join, slowdown: float) -> list[Operation]:
    """Join a collective that overlaps with compute, which then takes longer by `slowdown` seconds for each of its seconds.

    The actor loses that time directly after it has joined, while the collective runs. So a collective costs its seconds where
    no compute overlaps with it, and `slowdown` times them where compute does.
    """
    lost = slowdown * join.seconds
    return [join, *([Work(lost, f"slower during {_named(join)}", "communication")] if lost else [])]


def compute_pass(
    step: Step, seconds: float, gathers: Joins, sums: Joins, overlaps: bool, slowdown: float
) -> list[Operation]:
    """One forward or backward of so many seconds.

    The next all-gather is joined before the current piece computes, and each piece waits for its own. Sums of gradients are
    joined as soon as the backward pass has produced the gradients.

    Args:
        gathers: see Gathers.of.
        sums: each with the fraction of the pass after which it is joined.
        overlaps: collectives overlap with compute. Without it a rank waits for each.
        slowdown: part of a rank's compute that a collective takes meanwhile.
    """
    total, joins = sum(weight for weight, _ in gathers) or 1.0, [join for _, join in gathers]
    program: list[Operation] = list(joins[:1]) if overlaps else []
    done, end, remaining = 0.0, 0.0, list(sums)

    def compute_until(fraction: float) -> None:
        nonlocal done
        if fraction > done:
            program.append(Work(seconds * (fraction - done), str(step)))
            done = fraction

    def add_sum(join: Join) -> None:
        program.extend(_begun(join, slowdown) if overlaps else [join, wait_for(join)])

    for place, (weight, join) in enumerate(gathers):
        program += [] if overlaps else [join]
        program.append(wait_for(join))
        for following in joins[place + 1 : place + 2] if overlaps else ():
            program += _begun(following, slowdown)
        end += weight / total
        while remaining and remaining[0][0] <= end:
            compute_until(remaining[0][0])
            add_sum(remaining.pop(0)[1])
        compute_until(min(1.0, end))
    for fraction, join in remaining:
        compute_until(fraction)
        add_sum(join)
    compute_until(1.0)
    return program
