"""A schedule drawn as text, and a real step as a trace that Perfetto opens."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import NAMES, ForwardsFirst, Shape
from meshwright_dtensor.schedule.timetable import DURATION, Timetable
from meshwright_pipeline.install.division import call_of, checked_timetable
from meshwright_pipeline.runtime.executor import Span


def planned(plan: ParallelPlan) -> Timetable:
    """The timetable of a plan, in which a forward takes 1, a backward 2 and messages nothing.

    Raises:
        PlanError: the schedule cannot run the pipeline.
        UsageError: the plan has none.
    """
    rule = plan.pipeline
    if rule is None:
        raise UsageError("the plan has no pipeline: there is no schedule to draw; plan with pp=2, say")
    shape = Shape(plan.degree("pp"), len(rule.stages), rule.microbatches)
    schedule = schedule_named(rule.schedule)
    return checked_timetable(ForwardsFirst(schedule) if rule.loss == "batch" else schedule, shape)


def text(table: Timetable, width: int = 110) -> str:
    """A line for every rank, time from left to right: F and B with their microbatch, dots where it waits."""
    cell = max(len(str(action.microbatch)) for actions in table.ranks for action in actions) + 2
    several = len({action.stage for action in table.ranks[0]}) > 1
    cell += (1 + max(len(str(a.stage)) for a in table.ends)) if several else 0
    lines = []
    for rank, actions in enumerate(table.ranks):
        line, clock = "", 0.0
        for action in actions:
            length = int(DURATION[action.kind])
            begin = table.ends[action] - length
            line += ("." * (cell - 1) + " ") * round(begin - clock)
            name = f"{action.kind}{action.microbatch}" + (f"/{action.stage}" if several else "")
            line += name.ljust(cell * length - 1, "-" if action.kind == "B" else " ") + " "
            clock = table.ends[action]
        lines.append(f"rank {rank} | {line.rstrip()}")
    shown = [line if len(line) <= width else line[: width - 4] + " ..." for line in lines]
    held = ", ".join(map(str, table.alive))
    split = any(action.kind == "I" for action in table.ends)
    kinds = [f"{kind}: {NAMES[kind]}" for kind in (("F", "I", "W") if split else ("F", "B"))]
    head = f"{', '.join(kinds)} of a microbatch" + (", / its stage" if several else "")
    return "\n".join(
        [
            head,
            *shown,
            f"bubble: {100 * table.bubble:.1f}% of a step; microbatches whose activations a rank holds at most: {held}",
        ]
    )


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The part of a step in which the average rank did not compute; `spans` per rank."""
    length = max(span.end for own in spans for span in own) - min(span.start for own in spans for span in own)
    busy = sum(span.end - span.start for own in spans for span in own)
    return 1.0 - busy / (length * len(spans))


def write_trace(model: nn.Module, path: str | os.PathLike[str]) -> float:
    """Write the last step of a pipelined model as a Perfetto trace, one track for each rank of the axis; call it on every rank.

    The first rank of the axis writes. Clocks are each rank's own since its step began.

    Returns:
        The bubble that was measured: the part of the step in which the average rank did not compute.

    Raises:
        UsageError: the model is no pipeline, or has run no step.
    """
    call = call_of(model)
    if call is None or call.last is None:
        raise UsageError("there is no step to write: give a pipelined model that has been called")
    told: list[Any] = [None] * dist.get_world_size(call.context.group)
    dist.all_gather_object(told, call.last.spans, group=call.context.group)
    if call.rank == 0:
        events = [event for rank, spans in enumerate(told) for event in _events(rank, spans)]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return bubble(told)


def _events(rank: int, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """In the format of Chrome's trace viewer, which Perfetto reads: microseconds."""
    found: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"pp rank {rank}"}}
    ]
    for span in spans:
        action = span.action
        if span.waited > 0:
            start = span.start - span.waited
            found.append(_span(rank, "wait", start, span.waited, {"for": str(action)}))
        details = {"stage": action.stage, "microbatch": action.microbatch}
        found.append(
            _span(
                rank, f"{NAMES[action.kind]} {action.microbatch}", span.start, span.end - span.start, details
            )
        )
    return found


def _span(rank: int, name: str, start: float, length: float, details: dict[str, Any]) -> dict[str, Any]:
    return {
        "ph": "X", "pid": 0, "tid": rank, "name": name, "ts": start * 1e6, "dur": length * 1e6, "args": details,
    }  # fmt: skip
