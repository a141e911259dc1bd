"""The table of a report: a row for each plan, with the columns that the plans use or differ in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType

from meshwright_dtensor.plan import ParallelPlan, Prediction
from meshwright_dtensor.utils.bytesize import human_bytes
from meshwright_dtensor.utils.console import Console, Measurement, Table, Text, box
from meshwright_planner.evaluation.candidate import human_seconds
from meshwright_planner.recompute.rules import in_words
from meshwright_planner.reports.plan_view import PlanView

NONE = "-"

MOST_WIDTH = 10_000

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
    }
)
"""Column -> cell of a plan; shown where plans differ."""

Column = tuple[str, Callable[[PlanView], str]]
"""The title of a column, and the cell of a plan in it."""


def table_of(views: Sequence[PlanView]) -> Table:
    """The table of these plans, at least one."""
    first = views[0].plan
    columns = [*_plan_columns(views), *_predicted_columns(views)]
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{first.world_size} rank(s) of {first.provenance.cluster or '?'}, one step per rank (comm: exposed communication)",
        title_justify="left",
        title_style="",
        pad_edge=False,
    )
    for title in ("", *(title for title, _ in columns)):
        table.add_column(Text(title), justify="right", no_wrap=True)
    table.add_column(Text("bound by"))
    for number, view in enumerate(views, 1):
        bound = NONE if view.plan.predicted is None else view.bound.partition(",")[0]
        table.add_row(str(number), *(cell(view) for _, cell in columns), bound)
    return table


def _plan_columns(views: Sequence[PlanView]) -> Iterator[Column]:
    """Planner, degrees, and options of the plans."""
    plans = [view.plan for view in views]
    if len({_planner(view) for view in views}) > 1:
        yield "planner", _planner
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
        yield "measured", _measured


def _predicted_columns(views: Sequence[PlanView]) -> Iterator[Column]:
    """Time, memory and gap as predicted; "-" of plans without a prediction."""
    yield "step", _predicted(lambda predicted: human_seconds(predicted.step_seconds))
    yield "compute", _predicted(lambda predicted: human_seconds(predicted.compute_seconds))
    yield "comm", _predicted(lambda predicted: human_seconds(predicted.communication_seconds))
    if any(view.seconds.get("bubble") for view in views):
        yield "bubble", _part("bubble")
    yield "optimizer", _part("optimizer")
    yield "memory", _predicted(lambda predicted: human_bytes(predicted.total_bytes))
    yield "activations", _predicted(_activations)
    yield "gap", _predicted(lambda p: NONE if p.gap is None else f"{100 * p.gap:.1f}%")


def _predicted(cell: Callable[[Prediction], str]) -> Callable[[PlanView], str]:
    return lambda view: NONE if view.plan.predicted is None else cell(view.plan.predicted)


def _part(name: str) -> Callable[[PlanView], str]:
    """The cell of a part of the step."""
    return lambda view: NONE if view.plan.predicted is None else human_seconds(view.seconds.get(name, 0.0))


def _planner(view: PlanView) -> str:
    return view.plan.provenance.planner or "?"


def _measured(view: PlanView) -> str:
    seconds = view.plan.provenance.measured_seconds
    return NONE if seconds is None else human_seconds(seconds)


def _activations(predicted: Prediction) -> str:
    """Bytes of activations at the peak."""
    size = predicted.memory_bytes.get("activations")
    if size is None:
        return NONE
    return human_bytes(size) if size else "none*"


def full_width(table: Table, console: Console) -> int:
    """The columns with which no cell of the table is cut off."""
    return Measurement.get(console, console.options.update(max_width=MOST_WIDTH), table).maximum
