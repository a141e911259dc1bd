"""What every rank does in one step of a plan: the operations that a replay carries out."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan, PlannedCollective, StageTime
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.strategy.cost import TIED
from meshwright_planner.simulation.events import Actor, Drain, Operation, Post, Receive, Send, Work
from meshwright_planner.simulation.faults import LinkFault, Straggler, degraded
from meshwright_planner.simulation.mesh import Mesh, Place, Replicas
from meshwright_planner.simulation.passes import SHARED, Gathers, computing, drained
from meshwright_planner.simulation.schedule_steps import Step, steps_of

PASSES = ("forward", "backward")
NOTHING = 1e-9
"""Part of what a rank computes that is taken for the error of sums."""
MOST = 2048
"""Collectives of one pass on one axis that are replayed one by one; more are taken together."""


@dataclass(frozen=True)
class Faults:
    """What is wrong, by rank; and what all have in common.

    Args:
        stragglers, links: ranks and their faults.
        everywhere: (level, share of its bandwidth) of every rank; a share may be more than 1.
        compute: how many times as long every rank computes.
    """

    stragglers: Sequence[Straggler] = ()
    links: Sequence[LinkFault] = ()
    everywhere: frozenset[tuple[str, float]] = frozenset()
    compute: float = 1.0

    @property
    def ranks(self) -> set[int]:
        """Those with a fault."""
        return {s.rank for s in self.stragglers} | {f.rank for f in self.links}

    def slowdown(self, ranks: Sequence[int]) -> float:
        """How many times as long the slowest of these computes."""
        return self.compute * max([1.0, *(s.slowdown for s in self.stragglers if s.rank in ranks)])

    def of_links(self, ranks: set[int]) -> frozenset[tuple[str, float]]:
        """Faults of the links of these ranks."""
        return self.everywhere | {(f.level, f.share) for f in self.links if f.rank in ranks}


def elsewhere(plan: ParallelPlan, cluster: Cluster) -> str | None:
    """What to say of a replay on a cluster that the plan was not made for: a plan does not hold what work costs there."""
    made_for = plan.provenance.cluster
    if made_for is None or made_for == cluster.name:
        return None
    return (
        f"the plan was made for {made_for}: compute, the optimizer and communication inside of layers take what is predicted "
        f"there, and only messages between stages and collectives between replicas what the links of {cluster.name} say; plan for "
        f"{cluster.name} to know what a step takes on it"
    )


@dataclass
class Workload:
    """A plan taken apart for a replay.

    Args:
        plan, cluster: as predicted.
        faults: what is wrong.
        host: where schedules are found; None discovers what is installed.
    """

    plan: ParallelPlan
    cluster: Cluster
    faults: Faults = field(default_factory=Faults)
    host: PluginHost | None = None

    def __post_init__(self) -> None:
        plan = self.plan
        if plan.predicted is None or plan.predicted.split is None:
            raise UsageError(
                "the plan does not say where its time goes (predicted.split), so that there is nothing to replay; make "
                "it with `meshwright plan`"
            )
        self._clusters: dict[frozenset[tuple[str, float]], Cluster] = {}
        self.predicted, self.split = plan.predicted, plan.predicted.split
        inside = {c.axis for c in plan.collectives if c.phase == "forward" and c.axis != SHARED}
        loose = [axis for axis in plan.degrees if axis != "pp" and axis not in inside]
        self.mesh = Mesh(dict(plan.degrees), tuple(loose))
        self.replicas = Replicas.apart(self.mesh, sorted({self.mesh.place(r) for r in self.faults.ranks}))
        self.steps = steps_of(plan, self.host)
        self.stages = self._stages()
        self.handed = plan.pipeline is not None
        more = self.predicted.compute_seconds - self._computed()
        self.once = more if self.handed and more > NOTHING * self.predicted.compute_seconds else 0.0

    def _stages(self) -> tuple[StageTime, ...]:
        count = 1 if self.plan.pipeline is None else len(self.plan.pipeline.stages)
        if not self.split.stages and self.plan.pipeline is None:  # of a plan that somebody wrote
            third = self.predicted.compute_seconds / 3
            return (StageTime(forward_seconds=third, backward_seconds=2 * third),)
        if len(self.split.stages) != count:
            raise UsageError(
                f"the plan has {count} stages and times of {len(self.split.stages)} "
                "(predicted.split.stages); make it with `meshwright plan`"
            )
        return self.split.stages

    @property
    def microbatches(self) -> int:
        """Microbatches of one step."""
        return 1 if self.plan.pipeline is None else self.plan.pipeline.microbatches

    def actors(self) -> list[tuple[Place, int]]:
        """(replica, rank along pp) of everyone that a replay tells apart."""
        return [(place, rank) for place in self.replicas.classes for rank in range(len(self.steps))]

    def standing_for(self, actor: tuple[Place, int]) -> int:
        """How many replicas an actor stands for."""
        return self.replicas.classes[actor[0]]

    def ranks(self, actor: tuple[Place, int]) -> list[int]:
        """The ranks that an actor stands for, of its first replica."""
        return list(self.mesh.ranks(*actor))

    def programs(self) -> dict[Actor, list[Operation]]:
        """What every actor does."""
        return {actor: self._program(actor) for actor in self.actors()}

    # ---- one actor
    def _program(self, actor: tuple[Place, int]) -> list[Operation]:
        place, rank = actor
        own = self.ranks(actor)
        slow = self.faults.slowdown(own)
        steps = self.steps[rank]
        inside = self._inside(own)
        heaviest = self._heaviest()
        gathers = self._gathers(actor)
        hides, taken = self.cluster.hides_communication, self.cluster.interference
        last = max((i for i, s in enumerate(steps) if s.kind != "F"), default=None)
        between = next(
            (i for i, s in enumerate(steps) if s.kind != "F" and s.stage + 1 == len(self.stages)), None
        )
        every = self._posts(actor, "backward", "sums")
        program: list[Operation] = []
        if self.once:
            program.append(Work(slow * self.once, "the host, once a step"))
        for index, step in enumerate(steps):
            time = self.stages[step.stage]
            phase = "forward" if step.kind == "F" else "backward"
            part = (time.forward_seconds + time.backward_seconds) / heaviest / self.microbatches
            seconds = slow * step.part * getattr(time, f"{phase}_seconds")
            if index == between and self.split.between_seconds:
                program.append(
                    Work(slow * self.split.between_seconds, "the rest of the model, on the whole batch")
                )
            if step.needs is not None:
                program.append(Receive((place, *step.needs), f"{step.needs_what}"))
            sums = every if index == last and not self.handed else []
            program += computing(step, seconds, gathers.of(index), sums, hides, taken)
            program += [
                Work(step.part * part * by_phase[phase], f"{axis} of {step}", "communication")
                for axis, by_phase in inside.items()
                if by_phase[phase]
            ]
            if step.gives is not None:
                program.append(Send((place, *step.gives), self._message(step, own)))
        if self.handed:  # the ranks of a pipeline agree on the loss before gradients are handed over
            whole = frozenset((place, other) for other in range(len(self.steps)))
            program += [Post(whole, "end", 0.0), Drain(whole, "end", "the end of the schedule")]
            tied = self._tied(own)
            program += [Work(tied, TIED, "communication")] if tied else []
            program += [post for _, post in every]
        streams = {(p.group, p.stream): p for _, p in every}.values()
        program += [drained(post, taken) for post in sorted(streams, key=lambda p: p.after is not None)]
        if self.split.optimizer_seconds:
            program.append(Work(slow * self.split.optimizer_seconds, "optimizer", "optimizer"))
        return program

    # ---- communication
    def _axes(self, collective: PlannedCollective) -> list[str]:
        return collective.axis.split("+")

    def _gathers(self, actor: tuple[Place, int]) -> Gathers:
        """What an actor gathers of the parameters that ranks share."""
        blocks = {phase: [post for _, post in self._posts(actor, phase, "blocks")] for phase in PASSES}
        outside = [post for _, post in self._posts(actor, "forward", "outside")]
        again = self.plan.zero is not None and self.plan.zero.stage == 3
        return Gathers(blocks, outside, self.steps[actor[1]], len(self.stages) - 1, again)

    def _posts(self, actor: tuple[Place, int], phase: str, which: str) -> list[tuple[float, Post]]:
        """(part of the pass after which it is joined, collective) of those between replicas, in order.

        which: the "sums" of gradients, or the gathers of parameters, of "blocks" or "outside" of them.
        """
        place, rank = actor
        found: list[tuple[float, Post]] = []
        for collective in self.plan.collectives:
            axes = [a for a in self._axes(collective) if a in self.mesh.degrees]
            loose = [a for a in axes if a in self.mesh.loose]
            if not loose or collective.phase != phase or _which(collective) != which:
                continue
            meeting = self.replicas.meeting(place, loose)
            bad = {f.rank for f in self.faults.links}
            ranks = {r for r in bad if self.mesh.place(r) in meeting and self.mesh.stage_rank(r) == rank}
            seconds = self._seconds(collective, axes, ranks)
            group = frozenset((other, rank) for other in meeting)
            count = min(collective.count, MOST)
            after = None
            if SHARED in self.mesh.loose and SHARED not in loose:  # the shards are summed that it leaves
                after = (
                    frozenset((p, rank) for p in self.replicas.meeting(place, [SHARED])),
                    f"{SHARED}:{phase}",
                )
            stream = f"{collective.axis}:{phase if which == 'sums' else 'gather'}"
            lane = self.cluster.link_over(self.mesh.spans(axes)).name
            post = Post(group, stream, seconds * collective.count / count, after, lane)
            found += [((i + 1) / count, post) for i in range(count)]
        return sorted(found, key=lambda item: (item[0], item[1].after is not None))

    def _seconds(self, collective: PlannedCollective, axes: Sequence[str], ranks: set[int] | None) -> float:
        """Of one collective in which these ranks take part; None for a sound cluster."""
        spans = self.mesh.spans(axes)
        seen = self.cluster if ranks is None else self._seen(self.faults.of_links(ranks))
        return seen.link_over(spans).seconds(
            collective.kind, collective.nbytes, math.prod(d for _, d in spans)
        )

    def _seen(self, faults: frozenset[tuple[str, float]]) -> Cluster:
        if faults not in self._clusters:
            self._clusters[faults] = degraded(self.cluster, faults)
        return self._clusters[faults]

    def _inside(self, ranks: Sequence[int]) -> dict[str, dict[str, float]]:
        """Axis -> phase -> seconds a step that communication on a tight axis adds to what these ranks compute.

        What hides behind compute on a sound link goes on doing so; what a bad link adds is exposed once the compute that
        could hide it is used up.
        """
        found: dict[str, dict[str, float]] = {}
        for axis, exposed in self.split.exposed.items():
            axes = [a for a in axis.split("+") if a in self.mesh.degrees]
            if axis == "pp" or any(a in self.mesh.loose for a in axes):
                continue
            sound, bad = self._totals(axis, axes, None), self._totals(axis, axes, set(ranks))
            before, after = sum(sound.values()), sum(bad.values())
            found[axis] = {}
            for phase in PASSES:
                share = sound[phase] / before if before else 0.5
                found[axis][phase] = share * (exposed + after - before)
        for axis, hidden in self.split.hidden.items():
            axes = [a for a in axis.split("+") if a in self.mesh.degrees]
            if axis == "pp" or axis in found or any(a in self.mesh.loose for a in axes):
                continue
            after = sum(self._totals(axis, axes, set(ranks)).values())
            left = max(0.0, after - max(hidden, self.predicted.compute_seconds))
            found[axis] = dict.fromkeys(PASSES, left / 2)
        return found

    def _totals(self, axis: str, axes: Sequence[str], ranks: set[int] | None) -> dict[str, float]:
        own = [c for c in self.plan.collectives if c.axis == axis]
        return {
            phase: sum(c.count * self._seconds(c, axes, ranks) for c in own if c.phase == phase)
            for phase in PASSES
        }

    def _computed(self) -> float:
        """Seconds that the rank with most work computes in all its forwards and backwards, and between them."""
        totals = []
        for steps in self.steps:
            times = (
                s.part
                * (
                    self.stages[s.stage].forward_seconds
                    if s.kind == "F"
                    else self.stages[s.stage].backward_seconds
                )
                for s in steps
            )
            last = any(s.stage + 1 == len(self.stages) for s in steps)
            totals.append(math.fsum(times) + (self.split.between_seconds if last else 0.0))
        return max(totals)

    def _heaviest(self) -> float:
        """Seconds that the rank with most work computes for one microbatch: the split is of that rank."""
        totals = []
        for steps in self.steps:
            held = {step.stage for step in steps}
            totals.append(
                math.fsum(self.stages[s].forward_seconds + self.stages[s].backward_seconds for s in held)
            )
        return max(totals) or 1.0

    def _tied(self, ranks: Sequence[int]) -> float:
        """Seconds of summing gradients of parameters that several stages hold."""
        own = [c for c in self.plan.collectives if c.axis == "pp" and c.why == TIED]
        return sum(c.count * self._seconds(c, ["pp"], set(ranks)) for c in own)

    def _message(self, step: Step, ranks: Sequence[int]) -> float:
        """Seconds of what a step hands on to the next stage; 0 to a stage of the same rank."""
        if step.local:
            return 0.0
        phase = "forward" if step.kind == "F" else "backward"
        cut = step.stage if step.kind == "F" else step.stage - 1
        messages = [c for c in self.plan.collectives if c.axis == "pp" and c.phase == phase and c.why != TIED]
        own = [c for c in messages if _cut(c) == cut] or messages
        if not own:
            return 0.0
        largest = max(own, key=lambda c: c.nbytes)
        return self._seconds(largest, ["pp"], set(ranks))


def _cut(message: PlannedCollective) -> int | None:
    """Which cut a message crosses, by what the pipeline says of it: "from stage 1 to 2", "gradients to stage 1"."""
    found = re.search(r"stage (\d+)", message.why)
    return int(found[1]) if found else None


def _which(collective: PlannedCollective) -> str:
    """What a collective between replicas does; what lies outside of blocks is gathered in one unit, which says so."""
    if collective.kind != "all_gather":
        return "sums"
    return "outside" if "outside" in collective.why else "blocks"
