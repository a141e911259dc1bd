"""One plan as data: the parts of its step and memory, its bound and links, and hardware upgrades, replayed one by one.

The text, the page and the picture draw it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_planner.evaluation.candidate import configuration_name
from meshwright_planner.simulation.events import run
from meshwright_planner.simulation.workload import Faults, Workload, elsewhere

SHOWN = 0.002
"""Part of a step from which a replay differs visibly from the prediction: three digits are shown."""

TWICE = 2.0
FULL = 0.9
"""Part of the memory above which more of it may allow a faster plan."""

COLOURS = {
    "compute": "#3b6ea5",
    "forward": "#3b6ea5",
    "backward": "#5b9a68",
    "communication": "#c8823b",
    "bubble": "#c9c9c9",
    "optimizer": "#80679b",
}
"""Colours of the parts of a step, and of the bars of a timeline."""

_AXES = ("#c8823b", "#b5533c", "#d7a94b", "#96703f", "#cf8f7d", "#a8a13a")
_MEMORY = ("#3b6ea5", "#5b9a68", "#c8823b", "#80679b", "#b5533c", "#7d7d7d", "#d7a94b")


class Part(NamedTuple):
    """A coloured part of a bar: seconds of a step, or bytes of a rank."""

    name: str
    size: float
    text: str
    colour: str
    is_axis: bool = False


@dataclass(frozen=True)
class Upgrade:
    """One change of the cluster, in words, and the replayed step of the same plan on it.

    saved: the part of today's step that it saves; today: seconds of a step on the cluster as it is, also replayed.
    """

    what: str
    seconds: float
    saved: float
    today: float


@dataclass(frozen=True)
class PlanView:
    """One plan of a report.

    Args:
        name: the degrees of the plan in words.
        seconds: part of the step ("compute", "bubble", "optimizer", and one for each axis that communicates) -> seconds.
        memory: part -> bytes of one rank.
        bound: the largest part of the step, as the planner noted it.
        upgrades: what a better cluster would save, best first; empty without a cluster.
        memory_full: more memory may allow a faster plan.
        elsewhere: what the replay leaves out on a cluster other than the plan's; None on its own.
        links: mesh axes that communicate -> names of the links that they cross, innermost first; empty without a cluster.
    """

    plan: ParallelPlan
    name: str
    seconds: dict[str, float]
    memory: dict[str, int]
    bound: str
    upgrades: tuple[Upgrade, ...] = ()
    memory_full: bool = False
    elsewhere: str | None = None
    links: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @property
    def next_to_buy(self) -> str | None:
        """The change of the cluster that saves most; None where none is known to save time."""
        best = next((u for u in self.upgrades if u.saved > 0.001), None)
        memory = "memory is nearly full: more of it may allow a faster plan"
        if best is None:
            return memory if self.memory_full else None
        text = f"{best.what}: replayed, a step takes {human_seconds(best.seconds)}, {100 * best.saved:.0f}% less than "
        text += f"the {human_seconds(best.today)} of today"
        predicted = self.plan.predicted
        if predicted is not None and abs(best.today / predicted.step_seconds - 1.0) > SHOWN:
            text += f" (also replayed; predicted: {human_seconds(predicted.step_seconds)})"
        return f"{text}; {memory}" if self.memory_full else text

    def step_parts(self) -> list[Part]:
        """The parts of the step in order, each with its colour."""
        axes = dict(zip((part for part in self.seconds if part not in COLOURS), itertools.cycle(_AXES)))
        parts, colours = ((part, s) for part, s in self.seconds.items() if s), {**COLOURS, **axes}
        return [Part(part, s, human_seconds(s), colours[part], part in axes) for part, s in parts]

    def memory_parts(self) -> list[Part]:
        """The parts of the memory, the largest first, each with its colour."""
        by_size = sorted(self.memory.items(), key=lambda item: (-item[1], item[0]))
        coloured = zip(by_size, itertools.cycle(_MEMORY))
        return [Part(part, size, human_bytes(size), colour) for (part, size), colour in coloured if size]

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        predicted = self.plan.predicted
        return {
            "name": self.name,
            "planner": self.plan.provenance.planner,
            "degrees": dict(self.plan.degrees),
            "step_seconds": getattr(predicted, "step_seconds", None),
            "measured_seconds": self.plan.provenance.measured_seconds,
            "seconds": dict(self.seconds),
            "memory_bytes": dict(self.memory),
            **{name: getattr(predicted, name, None) for name in ("total_bytes", "gap", "proof")},
            "bound": self.bound,
            "links": {axes: list(names) for axes, names in self.links.items()},
            "upgrades": [
                {"what": u.what, "seconds": u.seconds, "saved": u.saved, "today_seconds": u.today}
                for u in self.upgrades
            ],
            "next_to_buy": self.next_to_buy,
            "notes": [*self.plan.provenance.notes, *([] if self.elsewhere is None else [self.elsewhere])],
        }


def view_of(
    plan: ParallelPlan,
    cluster: Cluster | None = None,
    host: PluginHost | None = None,
    what_to_buy: bool = True,
) -> PlanView:
    """The view of a plan; links and upgrades need a cluster. `host`, `what_to_buy`: see `explain`."""
    predicted = plan.predicted
    bound = next((n for n in plan.provenance.notes if n.startswith("bound by ")), "")
    memory = {} if predicted is None else predicted.memory_bytes
    view = PlanView(
        plan=plan,
        name=name_of(plan),
        seconds=seconds_of(plan),
        memory={part: size for part, size in memory.items() if part != "total"},
        bound=bound.removeprefix("bound by ").partition(";")[0],
    )
    if cluster is None:
        return view
    links = {c.axis: crossed(plan, c.axis, cluster) for c in plan.collectives}
    view = replace(view, elsewhere=elsewhere(plan, cluster), links=links)
    if predicted is None or predicted.split is None:
        return view
    if not what_to_buy:
        return view
    full = predicted.total_bytes > FULL * memory_limit(plan, cluster)
    return replace(view, upgrades=tuple(upgrades(plan, cluster, host)), memory_full=full)


def upgrades(plan: ParallelPlan, cluster: Cluster, host: PluginHost | None = None) -> list[Upgrade]:
    """The step of the plan on clusters that are twice as good in one respect, the largest gain first.

    The plan stays the same; another plan may profit more from the change.

    Raises UsageError: the plan has no predicted split of its step.
    """
    today = run(Workload(plan, cluster, host=host).programs()).seconds
    if not today:
        return []
    better = {"devices twice as fast": Faults(compute=1.0 / TWICE)}
    for level in cluster.links:
        everywhere = frozenset({(level.name, TWICE)})
        better[f"{level.name} of twice the bandwidth"] = Faults(everywhere=everywhere)
    changes = []
    for what, faults in better.items():
        seconds = run(Workload(plan, cluster, faults, host).programs()).seconds
        changes.append(Upgrade(what, seconds, 1.0 - seconds / today, today))
    return sorted(changes, key=lambda u: (u.seconds, u.what))


def memory_limit(plan: ParallelPlan, cluster: Cluster | None) -> int:
    """Bytes that a rank may use: the plan's limit, else the memory of a device of `cluster`; 0 where neither is known."""
    if plan.predicted is not None and plan.predicted.limit_bytes is not None:
        return plan.predicted.limit_bytes
    return 0 if cluster is None else cluster.usable_bytes


def crossed(plan: ParallelPlan, axes: str, cluster: Cluster) -> tuple[str, ...]:
    """Names of the links that collectives along these axes ("dp", "dp+zero") cross, innermost first."""
    names: set[str] = set()
    for axis in axes.split("+"):
        inner = list(plan.degrees)[list(plan.degrees).index(axis) + 1 :] if axis in plan.degrees else []
        stride = math.prod(plan.degree(other) for other in inner)
        names.update(cluster.link(stride, plan.degree(axis)).levels)
    return tuple(level.name for level in cluster.links if level.name in names)


def optimality(predicted: Prediction) -> str:
    """The optimality gap of a plan with its proof, in a line."""
    gap = "none" if predicted.gap == 0 else "unknown"
    if predicted.gap:
        gap = f"another plan may be up to {100 * predicted.gap:.1f}% faster"
    return f"gap: {gap}; {predicted.proof}"


def seconds_of(plan: ParallelPlan) -> dict[str, float]:
    """Part of the predicted step -> seconds: "compute", "bubble", "optimizer", and communication by mesh axis."""
    predicted = plan.predicted
    if predicted is None:
        return {}
    if predicted.split is None:
        rest = predicted.step_seconds - predicted.compute_seconds - predicted.communication_seconds
        parts = {"communication": predicted.communication_seconds, "optimizer": max(0.0, rest)}
        return {"compute": predicted.compute_seconds, **parts}
    split = predicted.split
    ends = {"bubble": split.bubble_seconds, "optimizer": split.optimizer_seconds}
    return {"compute": predicted.compute_seconds, **split.exposed, **ends}


def name_of(plan: ParallelPlan) -> str:
    """ "dp 2 x zero 2 (stage 3) x tp 4"."""
    pipeline = None if plan.pipeline is None else (plan.pipeline.schedule, plan.pipeline.microbatches)
    stage = 0 if plan.zero is None else plan.zero.stage
    return configuration_name(plan.degrees, stage, pipeline, plan.recompute)
