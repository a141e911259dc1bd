"""One plan as data: the parts of its step and memory, its bound and links, and hardware upgrades, replayed one by one.

The text, the page and the picture draw it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_planner.evaluation.candidate import configuration_name
from meshwright_planner.simulation.events import run
from meshwright_planner.simulation.workload import Faults, Workload, elsewhere

SHOWN = 0.002
"""Part of a step from which today's step differs visibly from the prediction: three digits are shown."""

TWICE = 2.0
FULL = 0.9
"""Part of the memory above which more of it may allow a faster plan."""

COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "#4d6480",
        "forward": "#3f7fd1",
        "backward": "#4b9b5f",
        "communication": "#d9822b",
        "bubble": "#d3d1c9",
        "optimizer": "#8a63b5",
    }
)
"""Colours of the parts of a step, and of the bars of a timeline. They are readable on light and on dark paper."""

AXIS_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "pp": "#8c3b2a",
        "dp": "#b98a1f",
        "zero": "#6d8f2f",
        "cp": "#c4504a",
        "ep": "#7a6a1c",
        "tp": "#e3b23c",
    }
)
"""Mesh axis -> colour of its communication; other axes take OTHER_AXES in turn."""

OTHER_AXES = ("#cf8f7d", "#96703f", "#a8a13a")

MEMORY_COLOURS: Mapping[str, str] = MappingProxyType(
    {
        "parameters": "#1f8a8a",
        "gradients": "#c2527e",
        # the colour of the optimizer everywhere
        "optimizer": COLOURS["optimizer"],
        "activations": "#5f6fc4",
        "temporaries": "#9c7b5a",
        "buffers": "#7d7d7d",
    }
)
"""Part of the memory -> colour; other parts take OTHER_PARTS in turn."""

OTHER_PARTS = ("#5aa9c4", "#a86fa8", "#7f9a80")


class Part(NamedTuple):
    """A coloured part of a bar: seconds of a step, or bytes of a rank."""

    name: str
    size: float
    text: str
    colour: str
    is_axis: bool = False


@dataclass(frozen=True)
class Upgrade:
    """One change of the cluster, in words, and the step of the same plan on it.

    saved: the part of today's step that it saves, as replayed; today: seconds of a step on the cluster as it is, those of the
    split on the plan's own cluster and replayed ones on any other.
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
        axes = [part for part in self.seconds if part not in COLOURS]
        colours = {**COLOURS, **_coloured(axes, AXIS_COLOURS, OTHER_AXES)}
        parts = ((part, s) for part, s in self.seconds.items() if s)
        return [Part(part, s, human_seconds(s), colours[part], part in axes) for part, s in parts]

    def memory_parts(self) -> list[Part]:
        """The parts of the memory, the largest first, each with its colour."""
        by_size = sorted(self.memory.items(), key=lambda item: (-item[1], item[0]))
        colours = _coloured(sorted(self.memory), MEMORY_COLOURS, OTHER_PARTS)
        return [Part(part, size, human_bytes(size), colours[part]) for part, size in by_size if size]

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

    The plan stays the same; another plan may profit more from the change. A replay says which part of the step a change saves.
    A better link saves no more than the split of the plan has of exposed communication over it.

    Raises UsageError: the plan has no predicted split of its step.
    """
    replayed = run(Workload(plan, cluster, host=host).programs()).seconds
    predicted = plan.predicted
    assert predicted is not None and predicted.split is not None
    at_home = elsewhere(plan, cluster) is None
    today = math.fsum(seconds_of(plan).values()) if at_home else replayed
    if not today or not replayed:
        return []
    better = {"devices twice as fast": (Faults(compute=1.0 / TWICE), today)}
    exposed = predicted.split.exposed if at_home else {}
    for level in cluster.links:
        over = [s for axes, s in exposed.items() if level.name in crossed(plan, axes, cluster)]
        faults = Faults(everywhere=frozenset({(level.name, TWICE)}))
        better[f"{level.name} of twice the bandwidth"] = faults, math.fsum(over) if at_home else today
    changes = []
    for what, (faults, most) in better.items():
        part = 1.0 - run(Workload(plan, cluster, faults, host).programs()).seconds / replayed
        saved = min(part, most / today)
        changes.append(Upgrade(what, today * (1.0 - saved), saved, today))
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


def _coloured(names: Sequence[str], fixed: Mapping[str, str], others: Sequence[str]) -> dict[str, str]:
    """Name -> colour. A name that is not in `fixed` takes one of `others`."""
    rest = itertools.cycle(others)
    return {name: fixed[name] if name in fixed else next(rest) for name in names}


def name_of(plan: ParallelPlan, *, short: bool = False) -> str:
    """ "dp 2 x zero 2 (stage 3) x tp 4"; `short`: without degrees of 1."""
    degrees = {axis: n for axis, n in plan.degrees.items() if n > 1} if short else plan.degrees
    pipeline = None if plan.pipeline is None else (plan.pipeline.schedule, plan.pipeline.microbatches)
    stage = 0 if plan.zero is None else plan.zero.stage
    return configuration_name(degrees, stage, pipeline, plan.recompute)
