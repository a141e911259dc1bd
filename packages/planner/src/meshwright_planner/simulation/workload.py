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
from meshwright_planner.simulation.events import Actor, Drain, Operation, Post, Receive, Send, Work
from meshwright_planner.simulation.faults import LinkFault, Straggler, degraded
from meshwright_planner.simulation.mesh import Mesh, Place, Replicas
from meshwright_planner.simulation.steps import Step, steps_of

SHARED = "zero"
PASSES = ("forward", "backward")
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
        # where ranks share parameters they gather them for every microbatch, else once
        again = self.plan.zero is not None and self.plan.zero.stage == 3
        forwards = [i for i, s in enumerate(steps) if s.kind == "F"]
        backwards = [i for i, s in enumerate(steps) if s.kind in "BI"]
        passes = {True: forwards if again else forwards[:1], False: backwards if again else backwards[:1]}
        last = max((i for i, s in enumerate(steps) if s.kind != "F"), default=None)
        program: list[Operation] = []
        for index, step in enumerate(steps):
            time = self.stages[step.stage]
            phase = "forward" if step.kind == "F" else "backward"
            part = (time.forward_seconds + time.backward_seconds) / heaviest / self.microbatches
            seconds = slow * step.part * getattr(time, f"{phase}_seconds")
            if step.needs is not None:
                program.append(Receive((place, *step.needs), f"{step.needs_what}"))
            gathers = self._part(actor, phase, passes[step.kind == "F"], index)
            sums = [] if index != last else self._posts(actor, phase, sums=True)
            if self.microbatches > 1:  # gradients are handed over when the last microbatch has gone back
                sums = [(1.0, post) for _, post in sums]
            program += self._computing(step, seconds, gathers, sums)
            program += [
                Work(step.part * part * by_phase[phase], f"{axis} of {step}", "communication")
                for axis, by_phase in inside.items()
                if by_phase[phase]
            ]
            if step.gives is not None:
                program.append(Send((place, *step.gives), self._message(step, own)))
        program += [
            Drain(group, stream, f"the sum of gradients over {stream.partition(':')[0]}")
            for group, stream in dict.fromkeys(
                (p.group, p.stream) for _, p in self._posts(actor, "backward", sums=True)
            )
        ]
        if self.split.optimizer_seconds:
            program.append(Work(slow * self.split.optimizer_seconds, "optimizer", "optimizer"))
        return program

    def _computing(
        self, step: Step, seconds: float, gathers: Sequence[Post], sums: Sequence[tuple[float, Post]]
    ) -> list[Operation]:
        """One forward or backward, cut where collectives are joined.

        Gathers are joined one ahead, and each piece waits for its own; sums of gradients are joined as soon as the piece of
        the backward pass is done that makes them.
        """
        program: list[Operation] = list(gathers[:1])
        pieces = max(1, len(gathers))
        done, left = 0.0, list(sums)
        for piece in range(pieces):
            if gathers:
                post = gathers[piece]
                program.append(Drain(post.group, post.stream, f"the parameters that {SHARED} shares"))
                program += gathers[piece + 1 : piece + 2]
            until = (piece + 1) / pieces
            while left and left[0][0] <= until:
                fraction, joined = left.pop(0)
                program += [Work(seconds * (fraction - done), str(step))] if fraction > done else []
                program.append(joined)
                done = fraction
            program += [Work(seconds * (until - done), str(step))] if until > done else []
            done = until
        return [*program, *(joined for _, joined in left)]

    def _part(self, actor: tuple[Place, int], phase: str, steps: Sequence[int], index: int) -> list[Post]:
        """Of the gathers of a pass, those that one of its `steps` does."""
        if index not in steps:
            return []
        every = [post for _, post in self._posts(actor, phase, sums=False)]
        place, count = steps.index(index), len(steps)
        return every[place * len(every) // count : (place + 1) * len(every) // count]

    # ---- communication
    def _axes(self, collective: PlannedCollective) -> list[str]:
        return collective.axis.split("+")

    def _posts(self, actor: tuple[Place, int], phase: str, sums: bool) -> list[tuple[float, Post]]:
        """(part of the pass after which it is joined, collective) of those between replicas, in order.

        sums: those of gradients; else the gathers of parameters.
        """
        place, rank = actor
        found: list[tuple[float, Post]] = []
        for collective in self.plan.collectives:
            axes = [a for a in self._axes(collective) if a in self.mesh.degrees]
            loose = [a for a in axes if a in self.mesh.loose]
            if not loose or collective.phase != phase or sums == (collective.kind == "all_gather"):
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
            stream = f"{collective.axis}:{phase if sums else 'gather'}"
            post = Post(group, stream, seconds * collective.count / count, after)
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

    def _heaviest(self) -> float:
        """Seconds that the rank with most work computes for one microbatch: the split is of that rank."""
        totals = []
        for steps in self.steps:
            held = {step.stage for step in steps}
            totals.append(
                math.fsum(self.stages[s].forward_seconds + self.stages[s].backward_seconds for s in held)
            )
        return max(totals) or 1.0

    def _message(self, step: Step, ranks: Sequence[int]) -> float:
        """Seconds of what a step hands on to the next stage; 0 to a stage of the same rank."""
        if step.local:
            return 0.0
        phase = "forward" if step.kind == "F" else "backward"
        cut = step.stage if step.kind == "F" else step.stage - 1
        messages = [c for c in self.plan.collectives if c.axis == "pp" and c.phase == phase]
        own = [c for c in messages if _cut(c) == cut] or messages
        if not own:
            return 0.0
        largest = max(own, key=lambda c: c.nbytes)
        return self._seconds(largest, ["pp"], set(ranks))


def _cut(message: PlannedCollective) -> int | None:
    """Which cut a message crosses, by what the pipeline says of it: "from stage 1 to 2", "gradients to stage 1"."""
    found = re.search(r"stage (\d+)", message.why)
    return int(found[1]) if found else None
