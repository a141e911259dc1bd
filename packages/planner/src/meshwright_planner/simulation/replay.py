"""Event simulation of one step of a plan on its cluster, without and with faults: its time, and which ranks wait."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_seconds
from meshwright_dtensor.utils.names import count_of
from meshwright_planner.simulation.events import Outcome, Span, run
from meshwright_planner.simulation.faults import LinkFault, Straggler
from meshwright_planner.simulation.mesh import Place
from meshwright_planner.simulation.workload import Faults, Workload, elsewhere

NOTICEABLE = 1e-3
"""Waits below this fraction of a step are not shown."""

SHOWN = 12
"""Ranks, waits and parts of the critical path in the text."""


@dataclass(frozen=True)
class Waiting:
    """Ranks that wait longer than without faults.

    Args:
        who: ranks that wait, of the first replica.
        alike: number of replicas that behave the same.
        for_whom: ranks that they wait for.
        why: the operation that they wait at.
        seconds: per step, in addition to the wait without faults.
    """

    who: tuple[int, ...]
    alike: int
    for_whom: tuple[int, ...]
    why: str
    seconds: float


@dataclass(frozen=True)
class Busy:
    """Time of one rank in a step: kind ("compute", "communication", "optimizer", "wait") -> seconds."""

    ranks: tuple[int, ...]
    alike: int
    seconds: Mapping[str, float]


@dataclass(frozen=True)
class Simulation:
    """The result of a simulation.

    Args:
        predicted_seconds: of the plan.
        sound_seconds: simulated without faults.
        seconds: simulated with faults.
        faults: in words.
        busy: how ranks spend the step, by rank.
        waiting: ranks that wait longer than without faults, longest first.
        chain: (ranks, kind, seconds) of the critical path, merged.
        timelines: spans of the replica that ends last, by rank along pp.
        notes: parts of the prediction that a simulation does not model.
    """

    world_size: int
    cluster: str
    predicted_seconds: float
    sound_seconds: float
    seconds: float
    faults: tuple[str, ...]
    busy: tuple[Busy, ...]
    waiting: tuple[Waiting, ...]
    chain: tuple[tuple[tuple[int, ...], str, float], ...]
    timelines: tuple[tuple[Span, ...], ...]
    notes: tuple[str, ...] = ()

    @property
    def slower(self) -> float:
        """Relative increase over a step without faults."""
        return self.seconds / self.sound_seconds - 1.0 if self.sound_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        names = ("world_size", "cluster", "predicted_seconds", "sound_seconds", "seconds")
        return {
            **{name: getattr(self, name) for name in names},
            "faults": list(self.faults),
            "busy": [vars(b) | {"ranks": list(b.ranks), "seconds": dict(b.seconds)} for b in self.busy],
            "waiting": [
                {"who": [*w.who], "alike": w.alike, "for": [*w.for_whom], "why": w.why, "seconds": w.seconds}
                for w in self.waiting
            ],
            "chain": [{"ranks": list(r), "kind": k, "seconds": s} for r, k, s in self.chain],
            "notes": list(self.notes),
        }

    def trace(self) -> dict[str, Any]:
        """The replica that ends last, in the Chrome trace format (Perfetto); times in microseconds."""
        events: list[dict[str, Any]] = []
        for rank, spans in enumerate(self.timelines):
            row = {"pid": 0, "tid": rank}
            events.append({"ph": "M", **row, "name": "thread_name", "args": {"name": f"pp rank {rank}"}})
            for span in spans:
                name = span.what if span.kind != "wait" else f"wait: {span.what}"
                times = {"ts": span.start * 1e6, "dur": span.seconds * 1e6}
                events.append({"ph": "X", **row, "name": name, "cat": span.kind, **times})
        return {"traceEvents": events, "displayTimeUnit": "ms"}

    def render(self) -> str:
        """As text."""
        lines = [
            f"{count_of(self.world_size, 'rank')} of {self.cluster}: a step takes {human_seconds(self.sound_seconds)} simulated, "
            f"{human_seconds(self.predicted_seconds)} predicted by the plan"
        ]
        lines += [f"note: {text}" for text in self.notes]
        if self.faults:
            lines += [f"with {text}" for text in self.faults]
            lines.append(f"a step takes {human_seconds(self.seconds)}: {100 * self.slower:.1f}% longer")
        lines.append("what a rank does with it:")
        for busy in self.busy[:SHOWN]:
            parts = ", ".join(f"{kind} {human_seconds(s)}" for kind, s in busy.seconds.items() if s)
            lines.append(f"  {_named(busy.ranks, busy.alike)}: {parts}")
        if len(self.busy) > SHOWN:
            lines.append(f"  and {len(self.busy) - SHOWN} more (--json has all)")
        for w in self.waiting[:SHOWN]:
            whom = f"{human_seconds(w.seconds)} more for {_named(w.for_whom)}"
            lines.append(f"{_named(w.who, w.alike)} wait {whom}: {w.why}")
        chain = (f"{_named(ranks)} {kind} {human_seconds(s)}" for ranks, kind, s in self.chain[:SHOWN])
        lines.append(f"the step is as long as this chain: {', '.join(chain)}")
        return "\n".join(lines) + "\n"


def simulate(
    plan: ParallelPlan,
    cluster: Cluster,
    *,
    stragglers: Iterable[Straggler] = (),
    link_faults: Iterable[LinkFault] = (),
    host: PluginHost | None = None,
) -> Simulation:
    """Simulate one step of `plan` on `cluster`, without and with faults.

    Ranks that communicate inside every block (tp, cp, ep) are synchronous and as slow as their slowest. Stages, replicas and
    collectives between replicas are simulated one by one; replicas without a difference are simulated once.

    `host` is where schedules are found; None: the installed plugins.

    Raises:
        PlanError: the plan's degrees do not make its world size.
        UsageError: the plan holds no prediction, or its schedule cannot be simulated.
        InfeasibleError: a link is gone, and no other replaces it.
    """
    plan.validate_for()
    faults = Faults(tuple(stragglers), tuple(link_faults))
    sound_load = Workload(plan, cluster, host=host)
    sound = run(sound_load.programs())
    load, outcome = sound_load, sound
    if faults.ranks:
        load = Workload(plan, cluster, faults, host)
        outcome = run(load.programs())
    assert plan.predicted is not None
    last = max(load.actors(), key=lambda a: (outcome.ends[a], a))
    return Simulation(
        world_size=plan.world_size,
        cluster=cluster.name,
        predicted_seconds=plan.predicted.step_seconds,
        sound_seconds=sound.seconds,
        seconds=outcome.seconds,
        faults=_in_words(faults),
        busy=tuple(_busy(load, outcome)),
        waiting=tuple(_waiting(load, outcome, sound_load, sound)) if faults.ranks else (),
        chain=tuple(_chain(load, outcome)),
        timelines=tuple(tuple(outcome.spans[last[0], rank]) for rank in range(len(load.steps))),
        notes=tuple(_unknown(plan, cluster)),
    )


def _unknown(plan: ParallelPlan, cluster: Cluster) -> Iterator[str]:
    """Notes on parts of the prediction that a simulation does not model."""
    stages, priced = plan.degree("pp"), plan.provenance.cost_model
    other = elsewhere(plan, cluster)
    if other is not None:
        yield other
    if priced is not None:
        yield f"predicted by the cost model {priced!r}; in a simulation collectives are timed by the cluster's links"
    if stages == 1:
        return
    if cluster.running(plan.world_size).shared_core_factors(stages):
        yield (
            "ranks share cores here. The simulation lets every rank compute as slowly as when all compute, even while others "
            "wait, so it takes longer than predicted"
        )
    if not cluster.hides_launch:
        yield "the host time of the pipeline runtime is in the prediction, and not in the simulation"


def _in_words(faults: Faults) -> tuple[str, ...]:
    slow: dict[float, list[int]] = defaultdict(list)
    for s in faults.stragglers:
        slow[s.slowdown].append(s.rank)
    weak: dict[tuple[str, float], list[int]] = defaultdict(list)
    for f in faults.links:
        weak[f.level, f.share].append(f.rank)
    texts = [f"{_named(r)} computing {slowdown:g} times as long" for slowdown, r in slow.items()]
    for (level, share), r in weak.items():
        state = "gone" if share == 0 else f"at {100 * share:g}% of its bandwidth"
        texts.append(f"{level} of {_named(r)} {state}")
    return tuple(texts)


def _busy(load: Workload, outcome: Outcome) -> Iterable[Busy]:
    for actor in sorted(load.actors(), key=lambda a: load.ranks(a)[0]):
        seconds = dict.fromkeys(("compute", "communication", "optimizer", "wait"), 0.0)
        for span in outcome.spans[actor]:
            seconds[span.kind] += span.seconds
        # a rank that is done waits for the last
        seconds["wait"] += outcome.seconds - outcome.ends[actor]
        yield Busy(tuple(load.ranks(actor)), load.replicas.representatives[actor[0]], seconds)


def _waits(spans: Sequence[Span]) -> dict[str, dict[Any, float]]:
    """What a rank waits at -> the rank that it waits for -> seconds."""
    seconds: dict[str, dict[Any, float]] = defaultdict(lambda: defaultdict(float))
    for span in spans:
        if span.kind == "wait":
            seconds[span.what][span.culprit] += span.seconds
    return seconds


def _waiting(load: Workload, outcome: Outcome, sound_load: Workload, sound: Outcome) -> list[Waiting]:
    waits: list[Waiting] = []
    for actor in load.actors():
        place, rank = actor
        before = _waits(sound.spans[sound_load.replicas.of[place], rank])
        for why, seconds_for in _waits(outcome.spans[actor]).items():
            more = sum(seconds_for.values()) - sum(before[why].values())
            if more > NOTICEABLE * outcome.seconds:
                who: tuple[Place, int] = max(seconds_for, key=lambda a: (seconds_for[a], a))
                ranks, culprits = tuple(load.ranks(actor)), tuple(load.ranks(who))
                waits.append(Waiting(ranks, load.replicas.representatives[place], culprits, why, more))
    return sorted(waits, key=lambda w: (-w.seconds, w.who))


def _chain(load: Workload, outcome: Outcome) -> list[tuple[tuple[int, ...], str, float]]:
    """The critical path, from the end of the step back to its start."""
    actor: Any = max(load.actors(), key=lambda a: (outcome.ends[a], a))
    now, totals = outcome.seconds, dict[tuple[Any, str], float]()
    index = {a: len(outcome.spans[a]) - 1 for a in load.actors()}
    # at this moment, so that ranks that wait for each other end the search
    visited: set[Any] = {actor}
    while now > 0 and index[actor] >= 0:
        span = outcome.spans[actor][index[actor]]
        if span.start >= now:
            index[actor] -= 1
            continue
        until = min(now, span.end)
        if span.kind == "wait" and span.culprit not in visited:
            actor = span.culprit
            visited.add(actor)
            continue
        totals[actor, span.kind] = totals.get((actor, span.kind), 0.0) + until - span.start
        now, visited = span.start, {actor}
    return [(tuple(load.ranks(a)), kind, seconds) for (a, kind), seconds in reversed(totals.items())]


def _named(ranks: Sequence[int], alike: int = 1) -> str:
    """ "ranks 0-7", "rank 3 and 15 replicas like it"."""
    steps = {b - a for a, b in pairwise(ranks)}
    if len(ranks) == 1:
        text = f"rank {ranks[0]}"
    elif steps == {1}:
        text = f"ranks {ranks[0]}-{ranks[-1]}"
    elif len(ranks) <= 4:
        text = "ranks " + ", ".join(map(str, ranks))
    else:
        text = f"ranks {ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return f"{text} and {alike - 1} replicas like it" if alike > 1 else text
