"""The table of a report: a row for each plan, with the columns that tell these plans apart or that they use."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.recompute.rules import in_words

if TYPE_CHECKING:
    from meshwright_planner.reports.explain import Explained

NONE = "-"

USED: Mapping[str, Callable[[ParallelPlan], str]] = MappingProxyType(
    {
        "zero\nstage": lambda plan: NONE if plan.zero is None else str(plan.zero.stage),
        "schedule": lambda plan: NONE if plan.pipeline is None else plan.pipeline.schedule,
        "micro-\nbatches": lambda plan: NONE if plan.pipeline is None else str(plan.pipeline.microbatches),
        "recompute": lambda plan: in_words(plan.recompute) if plan.recompute else NONE,
    }
)
"""Column -> what a plan has there; shown where some plan has something."""

DIFFERENT: Mapping[str, Callable[[ParallelPlan], str]] = MappingProxyType(
    {
        "sequence": lambda plan: "split" if plan.sequence_parallel else NONE,
        "context": lambda plan: (
            NONE if plan.context is None else f"{plan.context.attention} {plan.context.balance}"
        ),
    }
)
"""The same, shown where plans differ in it."""


def table_of(shown: Sequence[Explained]) -> Table:
    """The table of these plans, at least one."""
    plans = [explained.plan for explained in shown]
    every = dict.fromkeys(axis for plan in plans for axis in plan.degrees)
    axes = [axis for axis in every if any(plan.degree(axis) > 1 for plan in plans)] or list(every)
    planners = [plan.provenance.planner or "?" for plan in plans]
    piped = any("bubble" in e.seconds and e.seconds["bubble"] for e in shown)
    where = plans[0].provenance.cluster or "?"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plans[0].world_size} rank(s) of {where}, one step per rank (comm: what is exposed of it)",
        title_justify="left",
        title_style="",
        pad_edge=False,
    )
    chosen = [title for title, value in USED.items() if any(value(plan) != NONE for plan in plans)]
    chosen += [title for title, value in DIFFERENT.items() if len({value(plan) for plan in plans}) > 1]
    said = {**USED, **DIFFERENT}
    several = len(set(planners)) > 1
    tried = any(plan.provenance.measured_seconds is not None for plan in plans)
    measured = ["measured"] if tried else []
    columns = ["", *(["planner"] if several else []), *axes, *chosen, *measured, "step", "compute", "comm"]
    for column in (*columns, *(["bubble"] if piped else []), "optimizer", "memory", "activations", "gap"):
        table.add_column(Text(column), justify="right", no_wrap=True)
    table.add_column(Text("bound by"))
    for number, (explained, planner) in enumerate(zip(shown, planners, strict=True), 1):
        plan, predicted, seconds = explained.plan, explained.plan.predicted, explained.seconds
        head = [str(number), *([planner] if several else []), *(str(plan.degree(axis)) for axis in axes)]
        head += [said[title](plan) for title in chosen]
        if tried:
            taken = plan.provenance.measured_seconds
            head.append("-" if taken is None else human_seconds(taken))
        if predicted is None:
            table.add_row(*head, *["-"] * (8 + piped))
            continue
        table.add_row(
            *head,
            human_seconds(predicted.step_seconds),
            human_seconds(predicted.compute_seconds),
            human_seconds(predicted.communication_seconds),
            *([human_seconds(seconds.get("bubble", 0.0))] if piped else []),
            human_seconds(seconds["optimizer"]),
            human_bytes(predicted.total_bytes),
            _activations(predicted),
            "-" if predicted.gap is None else f"{100 * predicted.gap:.1f}%",
            explained.bound.partition(",")[0],
        )
    return table


def full_width(table: Table, console: Console) -> int:
    """Columns with which nothing of it is cut off."""
    return Measurement.get(console, console.options.update(max_width=MOST_WIDTH), table).maximum


MOST_WIDTH = 10_000

NO_ACTIVATIONS = "*none: memory is fullest when no activations are kept, as while the optimizer steps"


def _activations(predicted: Prediction) -> str:
    """Bytes of them at the peak; "-" where nothing is said of them."""
    size = predicted.memory_bytes.get("activations")
    if size is None:
        return "-"
    return human_bytes(size) if size else "none*"
