"""`explain`: plans side by side, what bounds each, and why the first one won."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from meshwright_dtensor.plan import ParallelPlan
from meshwright_planner.candidate import human_bytes, human_seconds


def explain(plans: ParallelPlan | Sequence[ParallelPlan], width: int = 110) -> str:
    """A table of the plans, best first: degrees, time split, memory, what bounds each; then why the first won.

    Args:
        plans: one plan, or what `plan(..., top_k=k)` returned.
        width: columns of the text.

    Returns:
        Plain text.
    """
    shown = [plans] if isinstance(plans, ParallelPlan) else list(plans)
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={})
    if not shown:
        return "no plans\n"
    console.print(_table(shown))
    for number, plan in enumerate(shown, 1):
        console.print(Text(f"{number}. {name_of(plan)}"))
        for note in plan.provenance.notes:
            if len(shown) == 1 or not note.startswith("also considered"):
                console.print(Text(f"   {note}"))
        for line in _communication(plan):
            console.print(Text(f"   {line}"))
    file = console.file
    assert isinstance(file, io.StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def name_of(plan: ParallelPlan) -> str:
    """ "dp 2 x zero 2 (stage 3) x tp 4"."""
    stage = {} if plan.zero is None else {"zero": f" (stage {plan.zero.stage})"}
    parts = (f"{axis} {degree}{stage.get(axis, '')}" for axis, degree in plan.degrees.items())
    return " x ".join(parts) or "one rank"


def _table(plans: Sequence[ParallelPlan]) -> Table:
    axes = list(dict.fromkeys(axis for plan in plans for axis in plan.degrees))
    where = plans[0].provenance.cluster or "?"
    table = Table(
        box=box.SIMPLE_HEAD,
        title=f"{plans[0].world_size} rank(s) of {where}, one step per rank",
        title_justify="left",
        title_style="",
        pad_edge=False,
    )
    for column in ("", *axes, "step", "compute", "exposed comm", "optimizer", "memory", "of it activations"):
        table.add_column(Text(column), justify="right")
    table.add_column(Text("bound by"))
    for number, plan in enumerate(plans, 1):
        degrees = [str(plan.degree(axis)) for axis in axes]
        predicted = plan.predicted
        if predicted is None:
            table.add_row(str(number), *degrees, *["-"] * 7)
            continue
        optimizer = predicted.step_seconds - predicted.compute_seconds - predicted.communication_seconds
        bound = next((n for n in plan.provenance.notes if n.startswith("bound by ")), "")
        table.add_row(
            str(number),
            *degrees,
            human_seconds(predicted.step_seconds),
            human_seconds(predicted.compute_seconds),
            human_seconds(predicted.communication_seconds),
            human_seconds(max(0.0, optimizer)),
            human_bytes(predicted.total_bytes),
            human_bytes(predicted.memory_bytes.get("activations", 0)),
            bound.removeprefix("bound by ").partition(";")[0],
        )
    return table


def _communication(plan: ParallelPlan) -> list[str]:
    totals: dict[tuple[str, str, str], list[int]] = {}
    for c in plan.collectives:
        entry = totals.setdefault((c.axis, c.phase, c.kind), [0, 0])
        entry[0] += c.count
        entry[1] += c.count * c.nbytes
    return [
        f"{axis} {phase}: {count} x {kind}, {human_bytes(size)} in all"
        for (axis, phase, kind), (count, size) in totals.items()
    ]
