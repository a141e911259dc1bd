"""`explain`: plans next to each other, the parts of their time and memory, their bounds, and why the first one is best."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.plugins import PluginHost, discover
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.console import as_text, full_width, table_of
from meshwright_dtensor.utils.html import details_html, table_html, text_html
from meshwright_dtensor.utils.names import count_of, number_ranges
from meshwright_planner.clusters.registry import cluster_of
from meshwright_planner.recompute.rules import in_words
from meshwright_planner.reports.plan_view import PlanView, optimality, view_of

WIDTH = 110

NONE = "-"

NO_ACTIVATIONS = "*none: memory is fullest when no activations are kept, as in the optimizer's step"

USED: Mapping[str, Callable[[ParallelPlan], str]] = MappingProxyType(
    {
        "zero\nstage": lambda plan: NONE if plan.zero is None else str(plan.zero.stage),
        "schedule": lambda plan: NONE if plan.pipeline is None else plan.pipeline.schedule,
        "micro-\nbatches": lambda plan: NONE if plan.pipeline is None else str(plan.pipeline.microbatches),
        "recompute": lambda plan: in_words(plan.recompute) if plan.recompute else NONE,
    }
)
"""Column -> cell of a plan; shown where some plan has a value."""

DIFFERENT: Mapping[str, Callable[[ParallelPlan], str]] = MappingProxyType(
    {
        "sequence": lambda plan: "split" if plan.sequence_parallel else NONE,
        "context": lambda plan: (
            NONE if plan.context is None else f"{plan.context.attention} {plan.context.balance}"
        ),
        "random\nnumbers": lambda plan: plan.rng,
    }
)
"""Column -> cell of a plan; shown where plans differ."""

Column = tuple[str, Callable[[PlanView], str]]
"""The title of a column, and the cell of a plan in it."""


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
        lines = []
        for number, view in enumerate(self.plans, 1):
            details = _details(view, alone=len(self.plans) == 1)
            lines += [f"{number}. {view.name}", *(f"   {line}" for line in details)]
        return self._compared() + as_text(lines, self.width)

    def brief(self) -> str:
        """The plans next to each other, and the best one in words; its figures are the last line."""
        if not self.plans:
            return "no plans\n"
        best = self.plans[0]
        chosen = [f"1. {best.name}", *(f"   {line}" for line in _reasons(best))]
        return self._compared() + as_text([*chosen, "", _figures(best)], self.width)

    def _repr_html_(self) -> str:
        """For a notebook: the table of the plans, and the reasons of each to open."""
        if not self.plans:
            return "<p>no plans</p>"
        columns, rows = _cells(self.plans)
        parts = [table_html(columns, rows, title=_title(self.plans[0].plan), right=columns[:-1])]
        for number, view in enumerate(self.plans, 1):
            text = as_text(_details(view, alone=len(self.plans) == 1), self.width)
            parts.append(details_html(f"{number}. {view.name}", text_html(text)))
        return "".join(parts)

    def _compared(self) -> str:
        """A line on the job, and the table of the plans."""
        columns, rows = _cells(self.plans)
        table = table_of(columns, rows, right=columns[:-1])
        # numbers are never cut off, however narrow the output is
        return as_text([_title(self.plans[0].plan), table], max(self.width, full_width(table)))


def explain(
    plans: ParallelPlan | Sequence[ParallelPlan],
    width: int = WIDTH,
    *,
    cluster: str | os.PathLike[str] | Cluster | None = None,
    host: PluginHost | None = None,
    what_to_buy: bool = True,
) -> Report:
    """Plans next to each other, best first: degrees, parts of time and memory, bounds, and why the first one is best.

    Args:
        plans: one plan, or the list that `plan(..., top_k=k)` returned.
        width: columns of the text. A table that needs more gets them.
        cluster: adds links and hardware upgrades: a name, a file or a Cluster, as for `plan`; None leaves them out.
        what_to_buy: replay each plan on better hardware, which may take longer than the search for the plan.
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
    return Report(tuple(view_of(plan, machine, host, what_to_buy) for plan in shown), width)


def _details(view: PlanView, alone: bool) -> list[str]:
    """The lines of one plan; notes on other plans only where the plan is `alone`."""
    lines = _reasons(view, alone) + _communication(view.plan, view.links)
    remarks = (("note", view.elsewhere), ("next to buy", view.next_to_buy))
    return lines + [f"{name}: {text}" for name, text in remarks if text is not None]


def _figures(view: PlanView) -> str:
    """The step and the memory of a plan in one line."""
    predicted = view.plan.predicted
    if predicted is None:
        return f"{view.name}: nothing was predicted"
    figures = [f"{human_seconds(predicted.step_seconds)} a step"]
    batch = view.plan.provenance.batch
    rows = batch.get("rows", 0)
    for number, unit in ((rows, "rows"), (rows * batch.get("tokens", 0), "tokens")):
        if number and predicted.step_seconds:
            rate = number / predicted.step_seconds
            figures.append(f"{rate:,.0f} {unit}/s" if rate >= 100 else f"{rate:.3g} {unit}/s")
    limit = f" of {human_bytes(predicted.limit_bytes)}" if predicted.limit_bytes else ""
    return ", ".join([*figures, f"{human_bytes(predicted.total_bytes)}{limit} on the fullest rank"])


def _reasons(view: PlanView, alone: bool = False) -> list[str]:
    """Why this plan, and the parts of its step and memory; notes on other plans only where it is `alone`."""
    plan, predicted = view.plan, view.plan.predicted
    lines = [n for n in plan.provenance.notes if alone or not n.startswith("also considered")]
    if predicted is not None and predicted.proof is not None:
        lines.append(optimality(predicted))
    if predicted is not None and (step := predicted.step_seconds):
        parts = (f"{p.name} {p.text} ({100 * p.size / step:.0f}%)" for p in view.step_parts())
        lines.append("step: " + ", ".join(parts))
        if predicted.split is not None and predicted.split.hidden:
            hidden = (f"{axis} {human_seconds(s)}" for axis, s in predicted.split.hidden.items())
            lines.append("overlapped with compute: " + ", ".join(hidden))
        if view.memory:
            lines.append("memory: " + ", ".join(f"{part.name} {part.text}" for part in view.memory_parts()))
        if view.memory.get("activations") == 0:
            lines.append(NO_ACTIVATIONS)
    return lines + _recompute_by_stage(plan)


def _title(plan: ParallelPlan) -> str:
    """The job of compared plans."""
    ranks = count_of(plan.world_size, "rank")
    return f"{ranks} of {plan.provenance.cluster or '?'}, one step per rank (comm: exposed communication)"


def _cells(views: Sequence[PlanView]) -> tuple[tuple[str, ...], list[tuple[object, ...]]]:
    """Titles and rows of the table of these plans, at least one. All columns but the last are figures."""
    titles, cells = zip(*_plan_columns(views), *_predicted_columns(views), strict=True)
    bounds = [NONE if view.plan.predicted is None else view.bound.partition(",")[0] for view in views]
    rows = [(number, *(cell(view) for cell in cells)) for number, view in enumerate(views, 1)]
    return ("", *titles, "bound by"), [(*row, b) for row, b in zip(rows, bounds)]


def _plan_columns(views: Sequence[PlanView]) -> Iterator[Column]:
    """Planner, degrees, and options of the plans."""
    plans = [view.plan for view in views]
    if len({plan.provenance.planner or "?" for plan in plans}) > 1:
        yield "planner", lambda view: view.plan.provenance.planner or "?"
    axes = dict.fromkeys(axis for plan in plans for axis in plan.degrees)
    several = [axis for axis in axes if any(plan.degree(axis) > 1 for plan in plans)]
    for axis in several or axes:
        yield axis, lambda view, axis=axis: str(view.plan.degree(axis))  # type: ignore[misc]
    for title, value in USED.items():
        if any(value(plan) != NONE for plan in plans):
            yield title, lambda view, value=value: value(view.plan)  # type: ignore[misc]
    for title, value in DIFFERENT.items():
        if len({value(plan) for plan in plans}) > 1:
            yield title, lambda view, value=value: value(view.plan)  # type: ignore[misc]
    if any(plan.provenance.measured_seconds is not None for plan in plans):
        yield "measured", lambda view: _seconds(view.plan.provenance.measured_seconds)


def _predicted_columns(views: Sequence[PlanView]) -> Iterator[Column]:
    """Time, memory and gap as predicted; "-" of plans without a prediction."""
    yield "step", _predicted(lambda p: human_seconds(p.step_seconds))
    yield "compute", _predicted(lambda p: human_seconds(p.compute_seconds))
    yield "comm", _predicted(lambda p: human_seconds(p.communication_seconds))
    if any(view.seconds.get("bubble") for view in views):
        yield "bubble", _part("bubble")
    yield "optimizer", _part("optimizer")
    yield "memory", _predicted(lambda p: human_bytes(p.total_bytes))
    yield "activations", _predicted(_activations)
    yield "gap", _predicted(lambda p: NONE if p.gap is None else f"{100 * p.gap:.1f}%")


def _predicted(cell: Callable[[Prediction], str]) -> Callable[[PlanView], str]:
    return lambda view: NONE if view.plan.predicted is None else cell(view.plan.predicted)


def _part(name: str) -> Callable[[PlanView], str]:
    """The cell of a part of the step."""
    return lambda view: NONE if view.plan.predicted is None else human_seconds(view.seconds.get(name, 0.0))


def _seconds(seconds: float | None) -> str:
    return NONE if seconds is None else human_seconds(seconds)


def _activations(predicted: Prediction) -> str:
    """Bytes of activations at the peak."""
    size = predicted.memory_bytes.get("activations")
    return NONE if size is None else human_bytes(size) if size else "none*"


def _recompute_by_stage(plan: ParallelPlan) -> list[str]:
    """The blocks that each stage recomputes, where stages differ; stages that are alike together."""
    if plan.pipeline is None or all(rule.pattern.endswith("*") for rule in plan.recompute):
        return []
    stages: dict[str, list[int]] = {}
    for number, names in enumerate(plan.pipeline.stages):
        rules = (next((r for r in plan.recompute if r.matches(name)), None) for name in names)
        counts = Counter(rule.policy for rule in rules if rule is not None)
        blocks = " and ".join(f"{count} {policy}" for policy, count in sorted(counts.items()))
        stages.setdefault(
            f"{blocks} of {count_of(len(names), 'module')}" if counts else "nothing", []
        ).append(number)
    parts = (
        f"{'stage' if len(n) == 1 else 'stages'} {number_ranges(n)}: {text}" for text, n in stages.items()
    )
    return ["recomputed: " + "; ".join(parts)]


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
