"""The operations of every rank in one step of a plan, for the event simulation."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan, PlannedCollective, StageTime
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.strategy.cost import TIED
from meshwright_dtensor.utils.memo import Memo
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.simulation.events import Actor, Join, Joins, Operation, Receive, Send, Wait, Work
from meshwright_planner.simulation.faults import LinkFault, Straggler, collective_seconds
from meshwright_planner.simulation.mesh import Mesh, Place, Replicas
from meshwright_planner.simulation.schedule_steps import Gathers, Step, compute_pass, steps_of, wait_for

PASSES = {"forward": "activations", "backward": "gradients"}
"""Phase -> content of its messages between stages."""

NOTHING = 1e-9
"""Fraction of a rank's compute time that counts as rounding error."""
MOST = 2048
"""Collectives of one pass on one axis that are simulated one by one; more are merged."""


@dataclass(frozen=True)
class Faults:
    """The faults of ranks, and changes that all ranks have in common.

    Args:
        stragglers, links: ranks and their faults.
        everywhere: (level, share of its bandwidth) of every rank; a share may be more than 1.
        compute: factor on the compute time of every rank.
    """

    stragglers: Sequence[Straggler] = ()
    links: Sequence[LinkFault] = ()
    everywhere: frozenset[tuple[str, float]] = frozenset()
    compute: float = 1.0

    @property
    def ranks(self) -> set[int]:
        """The ranks with a fault."""
        return {s.rank for s in self.stragglers} | {f.rank for f in self.links}

    def slowdown(self, ranks: Sequence[int]) -> float:
        """The factor on the compute time of the slowest of these ranks."""
        return self.compute * max([1.0, *(s.slowdown for s in self.stragglers if s.rank in ranks)])


@dataclass(frozen=True)
class Overlap:
    """The communication of a tight axis in one step of one rank, next to the compute that it overlaps with.

    Args:
        compute: seconds of the axis that no link takes.
        hideable: seconds of communication that compute can overlap with.
        loss: seconds of compute lost per second of communication, all of which may overlap.
    """

    compute: float
    hideable: float
    loss: float

    def exposed(self, seconds: float) -> float:
        """What is exposed of so many seconds of communication: no more than they are."""
        return max(self.loss * seconds, seconds - self.hideable)


def elsewhere(plan: ParallelPlan, cluster: Cluster) -> str | None:
    """A note on a simulation on a cluster that the plan was not made for: a plan does not hold compute times there."""
    made_for = plan.provenance.cluster
    if made_for is None or made_for == cluster.name:
        return None
    return (
        f"the plan was made for {made_for}: compute, the optimizer and communication inside of layers have the times predicted "
        f"there; only messages between stages and collectives between replicas are timed by the links of {cluster.name}. Plan for "
        f"{cluster.name} to predict a step on it"
    )


@dataclass
class Workload:
    """One step of a plan as operations of its ranks. `host`: where schedules are found; None: the installed plugins."""

    plan: ParallelPlan
    cluster: Cluster
    faults: Faults = field(default_factory=Faults)
    host: PluginHost | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        if plan.predicted is None or plan.predicted.split is None:
            raise UsageError(
                "the plan has no predicted.split, and a simulation needs the times of its stages; make the plan with "
                "`meshwright plan`"
            )
        self._collectives = Memo()
        self.predicted, self.split = plan.predicted, plan.predicted.split
        inside = {
            c.axis for c in plan.collectives if c.phase == "forward" and c.axis != SHARED
        } | self._staged
        loose = [axis for axis in plan.degrees if axis != "pp" and axis not in inside]
        self.mesh = Mesh(dict(plan.degrees), tuple(loose))
        self.replicas = Replicas.by_faults(self.mesh, sorted({self.mesh.place(r) for r in self.faults.ranks}))
        self.steps = steps_of(plan, self.host)
        self._owners = {step.stage: rank for rank, steps in enumerate(self.steps) for step in steps}
        self.stages = self._stages()
        self.pipelined = plan.pipeline is not None
        more = self.predicted.compute_seconds - self._computed()
        self.once = more if self.pipelined and more > NOTHING * self.predicted.compute_seconds else 0.0

    def _stages(self) -> tuple[StageTime, ...]:
        count = 1 if self.plan.pipeline is None else len(self.plan.pipeline.stages)
        # a plan written by hand
        if not self.split.stages and self.plan.pipeline is None:
            third = self.predicted.compute_seconds / 3
            return (StageTime(forward_seconds=third, backward_seconds=2 * third),)
        if len(self.split.stages) != count:
            raise UsageError(
                f"the plan has {count_of(count, 'stage')} and times of {len(self.split.stages)} "
                "(predicted.split.stages); make it with `meshwright plan`"
            )
        return self.split.stages

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return 1 if self.plan.pipeline is None else self.plan.pipeline.microbatches

    def actors(self) -> list[tuple[Place, int]]:
        """(replica, rank along pp) of every actor; replicas that behave the same are one."""
        return [(place, rank) for place in self.replicas.representatives for rank in range(len(self.steps))]

    def ranks(self, actor: tuple[Place, int]) -> list[int]:
        """The ranks that an actor represents, of its first replica."""
        return list(self.mesh.ranks(*actor))

    def programs(self) -> dict[Actor, list[Operation]]:
        """The operations of every actor."""
        return {actor: self._program(actor) for actor in self.actors()}

    # ---- one actor
    def _program(self, actor: tuple[Place, int]) -> list[Operation]:
        slow = self.faults.slowdown(self.ranks(actor))
        sums = self._joins(actor, "backward", "sums")
        program: list[Operation] = [Work(slow * self.once, "the host, once a step")] if self.once else []
        program += self._passes(actor, slow, [] if self.pipelined else sums)
        if self.pipelined:
            # the ranks agree on the loss, then sum the gradients of parameters that several stages hold
            group = frozenset((actor[0], rank) for rank in range(len(self.steps)))
            program += [Join(group, "end", 0.0), Wait(group, "end", "the end of the schedule")]
            shared = [c for c in self.plan.collectives if c.axis == "pp" and c.why == TIED]
            ranks = set(self.ranks(actor))
            if tied := sum(c.count * self._seconds(c, ["pp"], ranks) for c in shared):
                program.append(Work(tied, TIED, "communication"))
            program += [join for _, join in sums]
        streams = {(join.group, join.stream): join for _, join in sums}.values()
        program += [wait_for(join) for join in sorted(streams, key=lambda j: j.after is not None)]
        if self.split.optimizer_seconds:
            program.append(Work(slow * self.split.optimizer_seconds, "optimizer", "optimizer"))
        return program

    def _passes(self, actor: tuple[Place, int], slow: float, sums: Joins) -> list[Operation]:
        """The forwards and backwards of an actor; `sums`: of gradients, in its last backward."""
        (place, rank), ranks = actor, self.ranks(actor)
        steps, inside = self.steps[rank], self._inside(ranks)
        slower = {axis: self._slower(axis, ranks) for axis in self._staged}
        overlaps, slowdown = self.cluster.hides_communication, self.cluster.interference
        times, heaviest = self._stage_times()
        blocks = {phase: [join for _, join in self._joins(actor, phase, "blocks")] for phase in PASSES}
        outside = [join for _, join in self._joins(actor, "forward", "outside")]
        again = self.plan.zero is not None and self.plan.zero.stage == 3
        gathers = Gathers(blocks, outside, steps, len(self.stages) - 1, again)
        backwards = [i for i, step in enumerate(steps) if step.kind != "F"]
        last_backward = max(backwards, default=None)
        last_stage = (i for i in backwards if steps[i].stage + 1 == len(self.stages))
        between = next(last_stage, None) if self.split.between_seconds else None
        program: list[Operation] = []
        for index, step in enumerate(steps):
            time = self.stages[step.stage]
            phase = "forward" if step.kind == "F" else "backward"
            part = times[step.stage] / heaviest / self.microbatches
            seconds = slow * step.part * getattr(time, f"{phase}_seconds")
            if index == between:
                rest = slow * self.split.between_seconds
                what = "the rest of the model, on the whole batch"
                program.append(Work(rest, what))
                late = self.split.between_collectives.items()
                program += [Work(slower[axis] * s, f"{axis} of {what}", "communication") for axis, s in late]
            if step.needs is not None:
                program.append(Receive((place, *step.needs), f"{PASSES[phase]} for stage {step.stage}"))
            last = sums if index == last_backward else []
            program += compute_pass(step, seconds, gathers.of(index), last, overlaps, slowdown)
            of_strategies = {axis: [part * s for s in costs[phase]] for axis, costs in inside.items()}
            program += _works_of_axes(step, slow, slower, time, of_strategies)
            if step.gives is not None:
                program.append(Send((place, *step.gives), self._message(step, place, rank)))
        return program

    def _stage_times(self) -> tuple[list[float], float]:
        """Seconds of one microbatch in each stage, and in those of the rank with most work, which the split is of."""
        times = [(t.forward_seconds + t.backward_seconds) for t in self.stages]
        heaviest = max(math.fsum(times[s] for s in {step.stage for step in row}) for row in self.steps)
        return times, heaviest or 1.0

    # ---- communication
    def _joins(self, actor: tuple[Place, int], phase: str, which: str) -> Joins:
        """The collectives between replicas: "sums" of gradients, or all-gathers of parameters in "blocks" or "outside"."""
        place, rank = actor
        joins: Joins = []
        for collective in self.plan.collectives:
            axes = [a for a in collective.axis.split("+") if a in self.mesh.degrees]
            loose = [a for a in axes if a in self.mesh.loose]
            role = "sums"
            if collective.kind == "all_gather":
                # parameters outside of blocks are gathered in one unit, named so
                role = "outside" if "outside" in collective.why else "blocks"
            if not loose or collective.phase != phase or role != which:
                continue
            members = self.replicas.members(place, loose)
            bad = {f.rank for f in self.faults.links}
            staged = (r for r in bad if self.mesh.coordinate(r, "pp") == rank)
            ranks = {r for r in staged if self.mesh.place(r) in members}
            seconds = self._seconds(collective, axes, ranks)
            group = frozenset((other, rank) for other in members)
            count = min(collective.count, MOST)
            after = None
            # the shards of the shared axis are summed after it
            if SHARED in self.mesh.loose and SHARED not in loose:
                sharing = frozenset((p, rank) for p in self.replicas.members(place, [SHARED]))
                after = (sharing, f"{SHARED}:{phase}")
            stream = f"{collective.axis}:{phase if which == 'sums' else 'gather'}"
            lane = self.cluster.link_over(self.mesh.spans(axes)).name
            join = Join(group, stream, seconds * collective.count / count, after, lane)
            joins += [((i + 1) / count, join) for i in range(count)]
        return sorted(joins, key=lambda item: (item[0], item[1].after is not None))

    def _seconds(self, collective: PlannedCollective, axes: Sequence[str], ranks: set[int] | None) -> float:
        """Of one collective in which these ranks take part; `ranks` None: without faults."""
        spans, levels = self.mesh.spans(axes), frozenset[tuple[str, float]]()
        if ranks is not None:
            levels = self.faults.everywhere | {
                (f.level, f.share) for f in self.faults.links if f.rank in ranks
            }
        key = (collective.kind, collective.nbytes, spans, levels)
        return self._collectives.once(key, lambda: collective_seconds(self.cluster, *key))

    def _inside(self, ranks: Sequence[int]) -> dict[str, dict[str, tuple[float, float]]]:
        """Tight axis -> phase -> seconds per step of these ranks: compute for the axis, and exposed communication.

        Axes whose seconds stages have are left out.

        The compute is what the split counts as exposed and no collective takes, such as attention to the other chunks of
        a sequence.
        """
        seconds: dict[str, dict[str, tuple[float, float]]] = {}
        for axis in {**self.split.exposed, **self.split.hidden}:
            if axis == "pp" or not set(self.mesh.loose).isdisjoint(axis.split("+")) or axis in self._staged:
                continue
            sound, now = self._totals(axis, None), self._totals(axis, set(ranks))
            parts = self._overlap(axis, sum(sound.values()))
            compute, exposed = parts.compute, parts.exposed(sum(now.values()))
            before = sum(sound.values())
            shares = {phase: sound[phase] / before if before else 0.5 for phase in PASSES}
            seconds[axis] = {p: (share * compute, share * exposed) for p, share in shares.items()}
        return seconds

    @cached_property
    def _staged(self) -> frozenset[str]:
        """The axes of which the plan has the seconds of collectives in each pass of a stage."""
        return frozenset(self.split.between_collectives).union(
            *(time.collectives for time in self.split.stages)
        )

    def _slower(self, axis: str, ranks: Sequence[int]) -> float:
        """How many times as long as without faults the collectives of an axis take on these ranks."""
        sound, now = (sum(self._totals(axis, members).values()) for members in (None, set(ranks)))
        return now / sound if sound else 1.0

    def _overlap(self, axis: str, total: float) -> Overlap:
        """How the collectives of a tight axis, which take `total` seconds without faults, overlap with compute."""
        split, interference = self.split, self.cluster.interference
        exposed, hidden = split.exposed.get(axis, 0.0), split.hidden.get(axis, 0.0)
        sent = min(exposed, max(0.0, total - hidden))
        if not exposed:
            return Overlap(0.0, max(total, self.predicted.compute_seconds), 0.0)
        loss = min(interference, sent / total) if total else 0.0
        # where more than the loss is exposed, compute is too short to overlap with all
        bound = sent > loss * total * (1 + NOTHING)
        return Overlap(exposed - sent, total - sent if bound else max(total - sent, exposed - sent), loss)

    def _totals(self, axis: str, ranks: set[int] | None) -> dict[str, float]:
        """Phase -> seconds of the collectives of one rank on a tight axis."""
        axes = [a for a in axis.split("+") if a in self.mesh.degrees]
        collectives = [c for c in self.plan.collectives if c.axis == axis]

        def total(phase: str, members: set[int] | None) -> float:
            return sum(c.count * self._seconds(c, axes, members) for c in collectives if c.phase == phase)

        # a plan counts the collectives that placements need on all stages, and those of strategies on one rank, where they
        # take no longer than the axis is predicted to take
        predicted = self.split.exposed.get(axis, 0.0) + self.split.hidden.get(axis, 0.0)
        of_one_rank = sum(total(phase, None) for phase in PASSES) <= predicted * (1 + NOTHING)
        return {phase: total(phase, ranks) / (1 if of_one_rank else len(self.steps)) for phase in PASSES}

    def _computed(self) -> float:
        """Compute seconds of the rank with most work, in all its forwards and backwards and between them."""
        totals = []
        for steps in self.steps:
            stages = [(step, self.stages[step.stage]) for step in steps]
            times = (s.part * (t.forward_seconds if s.kind == "F" else t.backward_seconds) for s, t in stages)
            last = any(s.stage + 1 == len(self.stages) for s in steps)
            totals.append(math.fsum(times) + (self.split.between_seconds if last else 0.0))
        return max(totals)

    def _message(self, step: Step, place: Place, rank: int) -> float:
        """Seconds of the message of a step to the next stage; 0 to a stage of the same rank."""
        if step.local or step.gives is None:
            return 0.0
        phase = "forward" if step.kind == "F" else "backward"
        cut = step.stage if step.kind == "F" else step.stage - 1
        messages = [c for c in self.plan.collectives if c.axis == "pp" and c.phase == phase and c.why != TIED]
        # by the text of a message in the plan: "from stage 1 to 2", "gradients to stage 1"
        candidates = [c for c in messages if re.findall(r"stage (\d+)", c.why)[:1] == [str(cut)]] or messages
        if not candidates:
            return 0.0
        largest = max(candidates, key=lambda c: c.nbytes)
        # it crosses the links of both ends
        ends = {rank, self._owners[step.gives[1]]}
        return self._seconds(largest, ["pp"], {r for end in ends for r in self.mesh.ranks(place, end)})


def _works_of_axes(
    step: Step,
    slow: float,
    slower: Mapping[str, float],
    time: StageTime,
    of_strategies: Mapping[str, Sequence[float]],
) -> Iterator[Operation]:
    """What mesh axes add to one pass: (computing, communicating) seconds of strategies, and collectives of the stage."""
    for axis, (done, sent) in of_strategies.items():
        if seconds := slow * step.part * done:
            yield Work(seconds, f"{axis} of {step}")
        if seconds := step.communicates * sent:
            yield Work(seconds, f"{axis} of {step}", "communication")
    if step.communicates:
        for axis, passes in time.collectives.items():
            if seconds := passes[step.kind != "F"]:
                yield Work(slower[axis] * seconds, f"{axis} of {step}", "communication")
