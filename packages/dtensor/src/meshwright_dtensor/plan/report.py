"""A plan as text: placements, activations, stages, collectives, predictions and provenance."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping

from meshwright_dtensor.plan.fields import PlanFields
from meshwright_dtensor.utils.console import Console, Table, Text, box
from meshwright_dtensor.utils.names import count_of


def explain(plan: PlanFields, width: int = 110) -> str:
    """The plan as plain text, `width` columns wide."""
    console = Console(file=io.StringIO(), width=width, color_system=None, force_terminal=False, _environ={})
    console.print(Text(_mesh(plan)))
    for axis in (*plan.degrees, *(axis for axis in plan.strategies if axis not in plan.degrees)):
        if axis in plan.strategies:
            console.print(Text(f"  {axis}: {plan.strategies[axis]}"))
    if plan.sequence_parallel:
        console.print(Text("  sequence parallel"))
    if plan.context is not None:
        order = "zig-zag" if plan.context.balance == "zigzag" else "in chunks"
        console.print(Text(f"  context: attention by {plan.context.attention}, sequence {order}"))
    if plan.zero is not None:
        shared = (
            "optimizer states",
            "optimizer states, gradients",
            "optimizer states, gradients, parameters",
        )
        console.print(
            Text(f"  zero stage {plan.zero.stage}: ranks along zero share {shared[plan.zero.stage - 1]}")
        )
    if plan.precision is not None:
        console.print(
            Text(
                f"  precision: computed in {plan.precision.parameters}, gradients added up in {plan.precision.reduce}"
            )
        )
    for recomputed in plan.recompute:
        console.print(Text(f"  recomputed: {recomputed.pattern} ({recomputed.policy})"))
    _pipeline(plan, console)
    _parameters(plan, console)
    _activations(plan, console)
    _experts(plan, console)
    _collectives(plan, console)
    _prediction(plan, console)
    _provenance(plan, console)
    file = console.file
    assert isinstance(file, io.StringIO)
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    kept = [
        line
        for place, line in enumerate(lines)
        if line or (place and lines[place - 1])
        # no double blanks
    ]
    return "\n".join(kept).strip() + "\n"


def _mesh(plan: PlanFields) -> str:
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in plan.degrees.items())
    ranks = count_of(plan.world_size, "rank")
    return f"mesh: {degrees} = {ranks}" if degrees else f"mesh: {ranks}"


def _table(console: Console, title: str, columns: Iterable[str]) -> Table:
    """An empty table under a title, which is printed before it: a table's own title wraps at the width of the table."""
    console.print(Text(f"\n{title}"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    return table


def _parameters(plan: PlanFields, console: Console) -> None:
    if not plan.parameters:
        where = "on the ranks of its stage" if plan.pipeline is not None else "on all ranks"
        sharing = ", but for what ranks along zero share" if plan.degree("zero") > 1 else ""
        console.print(Text(f"\nparameters: no rule, so every parameter is whole {where}{sharing}"))
        return
    axes = list(plan.degrees)
    table = _table(
        console, "parameters (the first match wins; the others are replicated)", ["pattern", *axes]
    )
    for rule in plan.parameters:
        table.add_row(Text(rule.pattern), *(Text(rule.placement.get(axis, "I")) for axis in axes))
    console.print(table)


def _activations(plan: PlanFields, console: Console) -> None:
    if not plan.activations:
        console.print(Text("\nactivations: no target, so every state is derived"))
        return
    title = "activations (target states: I and X replicated, P partial, S(d) sharded on dim d)"
    table = _table(console, title, ["module", "call", "inputs", "outputs"])
    for rule in plan.activations:
        call = f"{rule.function} #{rule.occurrence}"
        inputs, outputs = _states(rule.inputs), _states(rule.outputs or ())
        table.add_row(Text(rule.module or "(root)"), Text(call), Text(inputs), Text(outputs))
    console.print(table)


def _experts(plan: PlanFields, console: Console) -> None:
    if not plan.experts:
        return
    sent = "tokens are sent to the ranks of ep that have theirs"
    title = f"experts ({sent if plan.degree('ep') > 1 else 'each data rank runs them on its own tokens'})"
    table = _table(console, title, ["module", "experts", "a rank", "kind", "assignment"])
    for rule in plan.experts:
        each = str(rule.count // plan.degree("ep"))
        table.add_row(
            Text(rule.module), Text(str(rule.count)), Text(each), Text(rule.kind), Text(rule.assignment)
        )
    console.print(table)


def _pipeline(plan: PlanFields, console: Console) -> None:
    rule = plan.pipeline
    if rule is None:
        return
    stages, microbatches = count_of(len(rule.stages), "stage"), count_of(rule.microbatches, "microbatch")
    title = f"pipeline: {stages}, {microbatches} a step, schedule {rule.schedule}"
    table = _table(console, title, ["stage", "modules"])
    for index, stage in enumerate(rule.stages):
        table.add_row(Text(str(index)), Text(", ".join(_number_ranges(stage))))
    if rule.shared:
        table.add_row(Text("all"), Text(", ".join(rule.shared)))
    console.print(table)


def _number_ranges(names: Iterable[str]) -> list[str]:
    """Names, with consecutive numbers joined: "layers.0-3"."""
    ranges: list[tuple[str, int | None, int]] = []
    for name in names:
        head, _, last = name.rpartition(".")
        number = int(last) if last.isdecimal() else None
        if number is not None and ranges and ranges[-1][0] == head and ranges[-1][1] is not None:
            if ranges[-1][2] + 1 == number:
                ranges[-1] = (head, ranges[-1][1], number)
                continue
        ranges.append((name if number is None else head, number, number or 0))
    return [
        head if first is None else f"{head}.{first}" if first == last else f"{head}.{first}-{last}"
        for head, first, last in ranges
    ]


def _states(values: Iterable[Mapping[str, str] | None]) -> str:
    return "; ".join(
        ",".join(f"{axis}={state}" for axis, state in states.items()) or "any"
        if states is not None
        else "any"
        for states in values
    )


def _collectives(plan: PlanFields, console: Console) -> None:
    if not plan.collectives:
        return
    total: dict[tuple[str, str, str], list[int]] = {}
    for item in plan.collectives:
        entry = total.setdefault((item.axis, item.kind, item.phase), [0, 0])
        entry[0] += item.count
        entry[1] += item.count * item.nbytes
    table = _table(console, "collectives a step", ["axis", "kind", "phase", "count", "bytes"])
    for (axis, kind, phase), (count, nbytes) in total.items():
        table.add_row(Text(axis), Text(kind), Text(phase), Text(str(count)), Text(size(nbytes)))
    console.print(table)


def _prediction(plan: PlanFields, console: Console) -> None:
    predicted = plan.predicted
    if predicted is None:
        console.print(Text("\npredicted: nothing"))
        return
    parts = f"compute {duration(predicted.compute_seconds)}, communication {duration(predicted.communication_seconds)}"
    console.print(Text(f"\npredicted step: {duration(predicted.step_seconds)} ({parts})"))
    if predicted.proof is not None:
        gap = "unknown" if predicted.gap is None else f"{100 * predicted.gap:.1f}%"
        console.print(Text(f"gap to the best there may be: {gap} ({predicted.proof})"))
    if predicted.memory_bytes:
        by_size = sorted(predicted.memory_bytes.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{part} {size(n)}" for part, n in by_size if part != "total" and n)
        if predicted.memory_bytes.get("activations") == 0:
            shown += "; no activations are kept then, as while the optimizer steps"
        console.print(
            Text(
                f"predicted memory of the fullest rank at its peak: {size(predicted.total_bytes)}"
                + (f" ({shown})" if shown else "")
            )
        )


def _provenance(plan: PlanFields, console: Console) -> None:
    origin = plan.provenance
    facts = {
        "planner": origin.planner,
        "cluster": origin.cluster,
        "cost model": origin.cost_model,
        "model": origin.model,
        "created": origin.created,
    }
    shown = [f"{name} {value}" for name, value in facts.items() if value]
    shown += [f"{name} {version}" for name, version in sorted(origin.versions.items())]
    console.print(Text(f"\nprovenance: {', '.join(shown) or 'written by hand'}"))
    if origin.batch:
        sizes = " of ".join(f"{number} {what}" for what, number in sorted(origin.batch.items()))
        console.print(Text(f"  planned for a batch of {sizes}"))
    if origin.request:
        request = ", ".join(f"{name}={_given(value)}" for name, value in sorted(origin.request.items()))
        console.print(Text(f"  asked for: {request}"))
    for note in origin.notes:
        console.print(Text(f"  {note}"))


def _given(value: object) -> str:
    return "+".join(f"{axis}={n}" for axis, n in value.items()) if isinstance(value, Mapping) else str(value)


def size(nbytes: int) -> str:
    """Text of a size in bytes: "1.50 GiB"."""
    value, units = float(nbytes), ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    return f"{nbytes} B" if units[0] == "B" else f"{value:.2f} {units[0]}"


def duration(seconds: float) -> str:
    """Text of a time in seconds: "12.3 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"
