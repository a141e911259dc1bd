"""Draws a schedule as text, and writes a step that has run as a Perfetto trace."""

from __future__ import annotations

import itertools
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
from meshwright_pipeline.runtime.actions.executor import Span


def planned(plan: ParallelPlan) -> Timetable:
    """The timetable of a plan: a forward takes 1, a backward 2, and messages take no time.

    Raises:
        PlanError: the schedule cannot run the pipeline.
        UsageError: the plan has no pipeline.
    """
    rule = plan.pipeline
    if rule is None:
        raise UsageError("the plan has no pipeline: there is no schedule to draw; plan with pp=2, say")
    shape = Shape(plan.degree("pp"), len(rule.stages), rule.microbatches)
    schedule = schedule_named(rule.schedule)
    return checked_timetable(ForwardsFirst(schedule) if rule.loss == "batch" else schedule, shape)


def text(table: Timetable, width: int = 110) -> str:
    """One line per rank, time from left to right: actions with their microbatch, dots where the rank waits."""
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
    most = f"microbatches whose activations a rank holds at most: {held}"
    return "\n".join([head, *shown, f"bubble: {100 * table.bubble:.1f}% of a step; {most}"])


def bubble(spans: Sequence[Sequence[Span]]) -> float:
    """The part of a step in which the average rank did not compute; `spans` per rank."""
    all_spans = list(itertools.chain.from_iterable(spans))
    length = max(span.end for span in all_spans) - min(span.start for span in all_spans)
    busy = sum(span.end - span.start for span in all_spans)
    return 1.0 - busy / (length * len(spans))


def write_trace(model: nn.Module, path: str | os.PathLike[str]) -> float:
    """Write the last step of a pipelined model as a Perfetto trace, with one track per rank of the axis.

    Call it on every rank; the first rank of the axis writes. Times count from the start of the step on each rank.

    Returns:
        The measured bubble: the part of the step in which the average rank did not compute.

    Raises UsageError: the model is not pipelined, or has run no step.
    """
    call = call_of(model)
    if call is None or call.last is None:
        raise UsageError("there is no step to write: give a pipelined model that has been called")
    gathered: list[Any] = [None] * dist.get_world_size(call.context.group)
    dist.all_gather_object(gathered, call.last.spans, group=call.context.group)
    if call.rank == 0:
        events = [event for rank, spans in enumerate(gathered) for event in _events(rank, spans)]
        Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return bubble(gathered)


def _events(rank: int, spans: Sequence[Span]) -> list[dict[str, Any]]:
    """In the format of Chrome's trace viewer, which Perfetto reads. Times are in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"pp rank {rank}"}}
    ]

    def add(name: str, start: float, length: float, args: dict[str, Any]) -> None:
        times = {"ts": start * 1e6, "dur": length * 1e6}
        events.append({"ph": "X", "pid": 0, "tid": rank, "name": name, **times, "args": args})

    for span in spans:
        action = span.action
        if span.waited > 0:
            add("wait", span.start - span.waited, span.waited, {"for": str(action)})
        details = {"stage": action.stage, "microbatch": action.microbatch}
        add(f"{NAMES[action.kind]} {action.microbatch}", span.start, span.end - span.start, details)
    return events
