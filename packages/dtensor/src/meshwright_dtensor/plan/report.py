"""A plan as text: placements, activations, stages, collectives, predictions and provenance."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from meshwright_dtensor.plan.fields import PlanFields
from meshwright_dtensor.utils.bytesize import human_bytes, human_seconds
from meshwright_dtensor.utils.console import Table, as_text, table_of
from meshwright_dtensor.utils.html import details_html, table_html, text_html
from meshwright_dtensor.utils.names import count_of


def explain(plan: PlanFields, width: int = 110) -> str:
    """The plan as plain text, `width` columns wide."""
    parts = (_head, _pipeline, _parameters, _activations, _experts, _collectives, _prediction, _origin)
    lines = as_text((item for part in parts for item in part(plan)), width).splitlines()
    # no double blanks
    kept = [line for place, line in enumerate(lines) if line or (place and lines[place - 1])]
    return "\n".join(kept).strip() + "\n"


def plan_html(plan: PlanFields) -> str:
    """The plan as HTML for a notebook: a table of its mesh and figures, and the whole text to open."""
    origin, predicted = plan.provenance, plan.predicted
    mesh = " x ".join(f"{axis} {n}" for axis, n in plan.degrees.items() if n > 1) or "one rank"
    facts: dict[str, object] = {"mesh": f"{mesh} = {count_of(plan.world_size, 'rank')}"}
    facts |= {name: value for name, value in (("model", origin.model), ("cluster", origin.cluster)) if value}
    if plan.pipeline is not None:
        microbatches = count_of(plan.pipeline.microbatches, "microbatch")
        facts["pipeline"] = (
            f"{count_of(len(plan.pipeline.stages), 'stage')}, {microbatches}, {plan.pipeline.schedule}"
        )
    if plan.zero is not None:
        facts["ZeRO"] = f"stage {plan.zero.stage}{_unit(plan)}"
    if predicted is not None:
        facts["predicted step"] = human_seconds(predicted.step_seconds)
        facts["predicted memory"] = f"{human_bytes(predicted.total_bytes)} on the fullest rank"
    facts["rules"] = f"{len(plan.parameters)} of parameters, {len(plan.activations)} of activations"
    table = table_html(("ParallelPlan", ""), facts.items())
    return table + details_html("the whole plan", text_html(explain(plan)))


Part = Iterator[str | Table]


def _unit(plan: PlanFields) -> str:
    """What shards along zero do not cut, in words, with a comma before them; nothing for equal chunks."""
    if plan.zero is None:
        return ""
    unit, owned, words = plan.zero.unit, len(plan.zero.owners), ""
    if unit is not None:
        words += f", in whole {f'blocks of {unit} elements' if isinstance(unit, int) else f'{unit}s'}"
    if owned:
        words += f", {count_of(owned, 'parameter')} whole on one rank each"
    return words


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[object]]) -> Part:
    """A table under a title, which is printed before it: a table's own title wraps at the width of the table."""
    yield f"\n{title}"
    yield table_of(columns, rows)


def _head(plan: PlanFields) -> Part:
    degrees = " x ".join(f"{axis} {degree}" for axis, degree in plan.degrees.items())
    yield f"mesh: {degrees}{' = ' if degrees else ''}{count_of(plan.world_size, 'rank')}"
    for axis in (*plan.degrees, *(axis for axis in plan.strategies if axis not in plan.degrees)):
        if axis in plan.strategies:
            yield f"  {axis}: {plan.strategies[axis]}"
    if plan.sequence_parallel:
        yield "  sequence parallel"
    if plan.context is not None:
        order = "zig-zag" if plan.context.balance == "zigzag" else "in chunks"
        yield f"  context: attention by {plan.context.attention}, sequence {order}"
    if plan.zero is not None:
        shared = ", ".join(("optimizer states", "gradients", "parameters")[: plan.zero.stage])
        yield f"  zero stage {plan.zero.stage}: ranks along zero share {shared}{_unit(plan)}"
    if plan.precision is not None:
        computed, reduced = plan.precision.parameters, plan.precision.reduce
        yield f"  precision: computed in {computed}, gradients added up in {reduced}"
    for recomputed in plan.recompute:
        yield f"  recomputed: {recomputed.pattern} ({recomputed.policy})"
    for compiled in plan.compile:
        yield f"  compiled: {compiled.pattern}{'' if compiled.backend == 'inductor' else f' ({compiled.backend})'}"
    if plan.rng == "fast":
        yield "  random numbers: a stream for each shard (fast), not those of one device"


def _parameters(plan: PlanFields) -> Part:
    if not plan.parameters:
        where = "on the ranks of its stage" if plan.pipeline is not None else "on all ranks"
        sharing = ", but for what ranks along zero share" if plan.degree("zero") > 1 else ""
        yield f"\nparameters: no rule, so every parameter is whole {where}{sharing}"
        return
    title = "parameters (the first match wins; the others are replicated)"
    rows = ((r.pattern, *(r.placement.get(axis, "I") for axis in plan.degrees)) for r in plan.parameters)
    yield from _table(title, ["pattern", *plan.degrees], rows)


def _activations(plan: PlanFields) -> Part:
    if not plan.activations:
        yield "\nactivations: no target, so every state is derived"
        return
    title = "activations (target states: I and X replicated, P partial, S(d) sharded on dim d)"
    rows = (
        (r.module or "(root)", r.call, _states(r.inputs), _states(r.outputs or ())) for r in plan.activations
    )
    yield from _table(title, ["module", "call", "inputs", "outputs"], rows)


def _experts(plan: PlanFields) -> Part:
    if plan.experts:
        ranks = plan.degree("ep")
        sent = "tokens are sent to the ranks of ep that have theirs"
        title = f"experts ({sent if ranks > 1 else 'each data rank runs them on its own tokens'})"
        rows = ((r.module, r.count, r.count // ranks, r.kind, r.assignment) for r in plan.experts)
        yield from _table(title, ["module", "experts", "a rank", "kind", "assignment"], rows)


def _pipeline(plan: PlanFields) -> Part:
    rule = plan.pipeline
    if rule is None:
        return
    stages, microbatches = count_of(len(rule.stages), "stage"), count_of(rule.microbatches, "microbatch")
    title = f"pipeline: {stages}, {microbatches} a step, schedule {rule.schedule}"
    rows = [(str(index), ", ".join(_number_ranges(stage))) for index, stage in enumerate(rule.stages)]
    shared = [("all", ", ".join(rule.shared))] if rule.shared else []
    yield from _table(title, ["stage", "modules"], rows + shared)


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
    texts = (",".join(f"{axis}={state}" for axis, state in (states or {}).items()) for states in values)
    return "; ".join(text or "any" for text in texts)


def _collectives(plan: PlanFields) -> Part:
    if not plan.collectives:
        return
    total: dict[tuple[str, str, str], list[int]] = {}
    for item in plan.collectives:
        entry = total.setdefault((item.axis, item.kind, item.phase), [0, 0])
        entry[0] += item.count
        entry[1] += item.count * item.nbytes
    rows = ((*key, count, human_bytes(nbytes)) for key, (count, nbytes) in total.items())
    yield from _table("collectives a step", ["axis", "kind", "phase", "count", "bytes"], rows)


def _prediction(plan: PlanFields) -> Part:
    predicted = plan.predicted
    if predicted is None:
        yield "\npredicted: nothing"
        return
    compute, sent = human_seconds(predicted.compute_seconds), human_seconds(predicted.communication_seconds)
    yield f"\npredicted step: {human_seconds(predicted.step_seconds)} (compute {compute}, communication {sent})"
    if predicted.proof is not None:
        gap = "unknown" if predicted.gap is None else f"{100 * predicted.gap:.1f}%"
        yield f"gap to the best there may be: {gap} ({predicted.proof})"
    if predicted.memory_bytes:
        by_size = sorted(predicted.memory_bytes.items(), key=lambda item: (-item[1], item[0]))
        shown = ", ".join(f"{part} {human_bytes(n)}" for part, n in by_size if part != "total" and n)
        if predicted.memory_bytes.get("activations") == 0:
            shown += "; no activations are kept then, as while the optimizer steps"
        total = f"predicted memory of the fullest rank at its peak: {human_bytes(predicted.total_bytes)}"
        yield f"{total} ({shown})" if shown else total


def _origin(plan: PlanFields) -> Part:
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
    yield f"\nprovenance: {', '.join(shown) or 'written by hand'}"
    if origin.batch:
        sizes = " of ".join(f"{number} {what}" for what, number in sorted(origin.batch.items()))
        yield f"  planned for a batch of {sizes}"
    if origin.request:
        request = ", ".join(f"{name}={_given(value)}" for name, value in sorted(origin.request.items()))
        yield f"  asked for: {request}"
    for note in origin.notes:
        yield f"  {note}"


def _given(value: object) -> str:
    return "+".join(f"{axis}={n}" for axis, n in value.items()) if isinstance(value, Mapping) else str(value)
