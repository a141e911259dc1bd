"""`explain`: plans side by side, where their time and memory go, what bounds each, and why the first one won."""

from __future__ import annotations

import io
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.text import Text

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import PluginHost, discover
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.clusters.registry import cluster_of
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.recompute.rules import in_words
from meshwright_planner.reports.table import NO_ACTIVATIONS, full_width, table_of
from meshwright_planner.reports.upgrades import Upgrade, memory_is_full, upgrades
from meshwright_planner.simulation.workload import elsewhere

WIDTH = 110

CLOSE = 0.002
"""Part of a step by which a replay and the prediction may differ with nothing said of it: three digits are shown."""


@dataclass(frozen=True)
class Explained:
    """One plan of a report.

    Args:
        plan: itself.
        name: its degrees in words.
        seconds: part of the step ("compute", "bubble", "optimizer", and one for each axis that communicates) -> seconds.
        memory: part -> bytes of one rank.
        bound: what bounds it, as the planner says.
        upgrades: what a better cluster would save, best first; empty where the cluster is not known.
        memory_full: more memory may allow a faster plan.
        elsewhere: what a replay on a cluster other than the plan's does not know; None on its own.
        links: mesh axes that communicate -> names of the links that they cross, innermost first; empty where the cluster is not
            known.
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
        """The change of the cluster that saves most; None where nothing is known to."""
        best = next((u for u in self.upgrades if u.saved > 0.001), None)
        more = "memory is nearly full: more of it may allow a faster plan"
        if best is None:
            return more if self.memory_full else None
        text = f"{best.what}: replayed, a step takes {human_seconds(best.seconds)}, {100 * best.saved:.0f}% less than "
        text += f"the {human_seconds(best.today)} of today"
        predicted = self.plan.predicted
        if predicted is not None and abs(best.today / predicted.step_seconds - 1.0) > CLOSE:
            text += f" (replayed too; {human_seconds(predicted.step_seconds)} are predicted)"
        return f"{text}; {more}" if self.memory_full else text

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        predicted = self.plan.predicted
        return {
            "name": self.name,
            "planner": self.plan.provenance.planner,
            "degrees": dict(self.plan.degrees),
            "step_seconds": None if predicted is None else predicted.step_seconds,
            "measured_seconds": self.plan.provenance.measured_seconds,
            "seconds": dict(self.seconds),
            "memory_bytes": dict(self.memory),
            "total_bytes": None if predicted is None else predicted.total_bytes,
            "gap": None if predicted is None else predicted.gap,
            "proof": None if predicted is None else predicted.proof,
            "bound": self.bound,
            "links": {axes: list(names) for axes, names in self.links.items()},
            "upgrades": [u.to_dict() for u in self.upgrades],
            "next_to_buy": self.next_to_buy,
            "notes": [*self.plan.provenance.notes, *([] if self.elsewhere is None else [self.elsewhere])],
        }


@dataclass(frozen=True)
class Report:
    """Plans, best first, explained. `str()` is the text, `to_dict()` the same as data."""

    plans: tuple[Explained, ...]
    width: int = WIDTH

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the best plan first."""
        return {
            "cluster": self.plans[0].plan.provenance.cluster if self.plans else None,
            "world_size": self.plans[0].plan.world_size if self.plans else None,
            "plans": [explained.to_dict() for explained in self.plans],
        }

    def __str__(self) -> str:
        if not self.plans:
            return "no plans\n"
        console = Console(
            file=io.StringIO(), width=self.width, color_system=None, force_terminal=False, _environ={}
        )
        table = table_of(self.plans)
        console.width = max(
            self.width, full_width(table, console)
        )  # numbers are not cut off, whatever it is printed into
        console.print(table)
        console.width = self.width
        for number, explained in enumerate(self.plans, 1):
            console.print(Text(f"{number}. {explained.name}"))
            for line in _details(explained, alone=len(self.plans) == 1):
                console.print(Text(f"   {line}"))
        file = console.file
        assert isinstance(file, io.StringIO)
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def explain(
    plans: ParallelPlan | Sequence[ParallelPlan],
    width: int = WIDTH,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    host: PluginHost | None = None,
) -> Report:
    """Plans side by side, best first: degrees, where time and memory go, what bounds each; then why the first won.

    Args:
        plans: one plan, or what `plan(..., top_k=k)` returned.
        width: columns of the text; a table that needs more has them.
        cluster: to say what would make it faster: a name, a file or a Cluster, as for `plan`; None leaves that out.
        host: where schedules and clusters are found; None discovers what is installed.

    Returns:
        A report: `print` it, or take its `to_dict()`.

    Raises:
        PluginError: there is no cluster of that name.
        UsageError: what is given is no cluster, or joins fewer ranks than the plans have.
    """
    shown = [plans] if isinstance(plans, ParallelPlan) else list(plans)
    machine = None
    if cluster is not None and shown:
        size = shown[0].world_size
        machine = cluster_of(cluster, host or discover(), size).running(size)
    return Report(tuple(_explained(plan, machine, host) for plan in shown), width)


def _explained(plan: ParallelPlan, cluster: Cluster | None, host: PluginHost | None) -> Explained:
    predicted = plan.predicted
    bound = next((n for n in plan.provenance.notes if n.startswith("bound by ")), "")
    better: tuple[Upgrade, ...] = ()
    full = False
    if predicted is not None and predicted.split is not None and cluster is not None:
        better, full = tuple(upgrades(plan, cluster, host)), memory_is_full(plan, cluster)
    return Explained(
        plan=plan,
        name=name_of(plan),
        seconds=seconds_of(plan),
        memory={}
        if predicted is None
        else {part: size for part, size in predicted.memory_bytes.items() if part != "total"},
        bound=bound.removeprefix("bound by ").partition(";")[0],
        upgrades=better,
        memory_full=full,
        elsewhere=None if cluster is None else elsewhere(plan, cluster),
        links={} if cluster is None else {c.axis: crossed(plan, c.axis, cluster) for c in plan.collectives},
    )


def crossed(plan: ParallelPlan, axes: str, cluster: Cluster) -> tuple[str, ...]:
    """Names of the links that collectives along these axes ("dp", "dp+zero") cross, innermost first."""
    found: set[str] = set()
    for axis in axes.split("+"):
        inner = list(plan.degrees)[list(plan.degrees).index(axis) + 1 :] if axis in plan.degrees else []
        stride = math.prod(plan.degree(other) for other in inner)
        found.update(cluster.link(stride, plan.degree(axis)).levels)
    return tuple(level.name for level in cluster.links if level.name in found)


def how_good(predicted: Prediction) -> str:
    """The gap of a plan and its proof, in a line."""
    if predicted.gap is None:
        return f"gap: unknown; {predicted.proof}"
    if not predicted.gap:
        return f"gap: none; {predicted.proof}"
    return f"gap: another plan may be up to {100 * predicted.gap:.1f}% faster; {predicted.proof}"


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
    found = {"compute": predicted.compute_seconds, **split.exposed}
    return {**found, "bubble": split.bubble_seconds, "optimizer": split.optimizer_seconds}


def name_of(plan: ParallelPlan) -> str:
    """ "dp 2 x zero 2 (stage 3) x tp 4"."""
    said = {} if plan.zero is None else {"zero": f" (stage {plan.zero.stage})"}
    if plan.pipeline is not None:
        said["pp"] = f" ({plan.pipeline.schedule}, {plan.pipeline.microbatches} microbatches)"
    parts = (f"{axis} {degree}{said.get(axis, '')}" for axis, degree in plan.degrees.items())
    again = f", recompute {in_words(plan.recompute)}" if plan.recompute else ""
    return (" x ".join(parts) or "one rank") + again


def _details(explained: Explained, alone: bool) -> list[str]:
    plan = explained.plan
    lines = [n for n in plan.provenance.notes if alone or not n.startswith("also considered")]
    if plan.predicted is not None and plan.predicted.proof is not None:
        lines.append(how_good(plan.predicted))
    if plan.predicted is not None and plan.predicted.step_seconds:
        whole, memory = plan.predicted.step_seconds, explained.memory
        parts = (
            f"{part} {human_seconds(s)} ({100 * s / whole:.0f}%)"
            for part, s in explained.seconds.items()
            if s
        )
        lines.append("step: " + ", ".join(parts))
        hidden = {} if plan.predicted.split is None else plan.predicted.split.hidden
        if hidden:
            lines.append(
                "hidden behind compute: " + ", ".join(f"{a} {human_seconds(s)}" for a, s in hidden.items())
            )
        by_size = sorted(memory.items(), key=lambda item: (-item[1], item[0]))
        if by_size:
            lines.append("memory: " + ", ".join(f"{part} {human_bytes(n)}" for part, n in by_size if n))
        if memory.get("activations") == 0:
            lines.append(NO_ACTIVATIONS)
    lines += _by_stage(plan)
    lines += _communication(plan, explained.links)
    if explained.elsewhere is not None:
        lines.append(f"note: {explained.elsewhere}")
    if explained.next_to_buy is not None:
        lines.append(f"next to buy: {explained.next_to_buy}")
    return lines


def _by_stage(plan: ParallelPlan) -> list[str]:
    """What each stage runs again, where that is not the same for all blocks."""
    if plan.pipeline is None or all(rule.pattern.endswith("*") for rule in plan.recompute):
        return []
    found = []
    for number, names in enumerate(plan.pipeline.stages):
        rules = (next((r for r in plan.recompute if r.matches(name)), None) for name in names)
        counts = Counter(rule.policy for rule in rules if rule is not None)
        said = " and ".join(f"{count} {policy}" for policy, count in sorted(counts.items())) or "nothing"
        found.append(f"stage {number} {said}" + (f" of {len(names)} modules" if counts else ""))
    return ["run again: " + ", ".join(found)]


def _communication(plan: ParallelPlan, links: Mapping[str, tuple[str, ...]]) -> list[str]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for c in plan.collectives:
        entry = totals.setdefault((c.axis, c.phase, c.kind), [0, 0])
        entry[0] += c.count
        entry[1] += c.count * c.nbytes
    return [
        f"{axis} {phase}: {count} x {kind}, {human_bytes(size)} in all"
        + (f", over {' and '.join(links[axis])}" if links.get(axis) else "")
        for (axis, phase, kind), (count, size) in totals.items()
    ]
