"""`explain`: plans next to each other, the parts of their time and memory, their bounds, and why the first one is best."""

from __future__ import annotations

import io
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import PluginHost, discover
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.console import Console, Text
from meshwright_planner.clusters.registry import cluster_of
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.reports.plan_view import PlanView, optimality, view_of
from meshwright_planner.reports.table import NO_ACTIVATIONS, full_width, table_of

WIDTH = 110


@dataclass(frozen=True)
class Report:
    """Plans, best first, explained. `str()` is the text, `to_dict()` the same as data."""

    plans: tuple[PlanView, ...]
    width: int = WIDTH

    def to_dict(self) -> dict[str, Any]:
        """As plain data, the best plan first."""
        return {
            "cluster": self.plans[0].plan.provenance.cluster if self.plans else None,
            "world_size": self.plans[0].plan.world_size if self.plans else None,
            "plans": [view.to_dict() for view in self.plans],
        }

    def __str__(self) -> str:
        if not self.plans:
            return "no plans\n"
        file = io.StringIO()
        console = Console(file=file, width=self.width, color_system=None, force_terminal=False, _environ={})
        table = table_of(self.plans)
        # numbers are never cut off, however narrow the output is
        console.width = max(self.width, full_width(table, console))
        console.print(table)
        console.width = self.width
        for number, view in enumerate(self.plans, 1):
            console.print(Text(f"{number}. {view.name}"))
            for line in _details(view, alone=len(self.plans) == 1):
                console.print(Text(f"   {line}"))
        return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def explain(
    plans: ParallelPlan | Sequence[ParallelPlan],
    width: int = WIDTH,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    host: PluginHost | None = None,
) -> Report:
    """Plans next to each other, best first: degrees, parts of time and memory, bounds, and why the first one is best.

    Args:
        plans: one plan, or the list that `plan(..., top_k=k)` returned.
        width: columns of the text. A table that needs more gets them.
        cluster: adds links and hardware upgrades: a name, a file or a Cluster, as for `plan`; None leaves them out.
        host: where schedules and clusters are found; None discovers what is installed.

    Returns:
        A report: `print` it, or take its `to_dict()`.

    Raises:
        PluginError: there is no cluster of that name.
        UsageError: `cluster` is no cluster, or has fewer ranks than the plans.
    """
    shown = [plans] if isinstance(plans, ParallelPlan) else list(plans)
    machine = None
    if cluster is not None and shown:
        size = shown[0].world_size
        machine = cluster_of(cluster, host or discover(), size).running(size)
    return Report(tuple(view_of(plan, machine, host) for plan in shown), width)


def _details(view: PlanView, alone: bool) -> list[str]:
    """The lines of one plan; notes on other plans only where the plan is `alone`."""
    plan, predicted = view.plan, view.plan.predicted
    lines = [n for n in plan.provenance.notes if alone or not n.startswith("also considered")]
    if predicted is not None and predicted.proof is not None:
        lines.append(optimality(predicted))
    if predicted is not None and predicted.step_seconds:
        lines += _time_and_memory(view, predicted.step_seconds)
    lines += _recompute_by_stage(plan)
    lines += _communication(plan, view.links)
    if view.elsewhere is not None:
        lines.append(f"note: {view.elsewhere}")
    if view.next_to_buy is not None:
        lines.append(f"next to buy: {view.next_to_buy}")
    return lines


def _time_and_memory(view: PlanView, step_seconds: float) -> Iterator[str]:
    parts = (f"{part.name} {part.text} ({100 * part.size / step_seconds:.0f}%)" for part in view.step_parts())
    yield "step: " + ", ".join(parts)
    split = None if view.plan.predicted is None else view.plan.predicted.split
    if split is not None and split.hidden:
        hidden = (f"{axis} {human_seconds(seconds)}" for axis, seconds in split.hidden.items())
        yield "overlapped with compute: " + ", ".join(hidden)
    if view.memory:
        yield "memory: " + ", ".join(f"{part.name} {part.text}" for part in view.memory_parts())
    if view.memory.get("activations") == 0:
        yield NO_ACTIVATIONS


def _recompute_by_stage(plan: ParallelPlan) -> list[str]:
    """The blocks that each stage recomputes, where stages differ."""
    if plan.pipeline is None or all(rule.pattern.endswith("*") for rule in plan.recompute):
        return []
    stages = []
    for number, names in enumerate(plan.pipeline.stages):
        rules = (next((r for r in plan.recompute if r.matches(name)), None) for name in names)
        counts = Counter(rule.policy for rule in rules if rule is not None)
        blocks = " and ".join(f"{count} {policy}" for policy, count in sorted(counts.items())) or "nothing"
        stages.append(f"stage {number} {blocks}" + (f" of {len(names)} modules" if counts else ""))
    return ["recomputed: " + ", ".join(stages)]


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
