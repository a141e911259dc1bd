"""What a search may choose of a pipeline: degrees, schedules, and numbers of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright_dtensor.errors import PlanError, PluginError, UsageError
from meshwright_dtensor.plugins import ScheduleSpec, discover
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Shape
from meshwright_dtensor.strategy import SearchRequest, divisors
from meshwright_dtensor.utils.names import listing
from meshwright_pipeline.analysis.row_mixing import CannotSplit
from meshwright_pipeline.planning.survey import survey_of

PER_STAGE = 4
"""Microbatches for each stage, where the user names no number: the bubble of 1f1b is then about a fifth."""


def pipeline_choices(request: SearchRequest, degree: int) -> Iterator[dict[str, Any]]:
    """Every installed schedule that takes a pipeline of this degree, with numbers of microbatches worth a look.

    What the user named is kept. Schedules that cannot be loaded are left out, unless they are named.
    """
    said = request.options
    known = survey_of(request)
    installed = discover().all(ScheduleSpec) if known is None else known.installed
    names = [said["schedule"]] if "schedule" in said else list(installed)
    for name in names:
        try:
            schedule = schedule_named(name) if known is None else known.schedule(name)
        except (PluginError, UsageError):
            if name in said.values():
                raise
            continue
        stages = degree * (schedule.stages_each if known is None else known.stages_each(schedule, degree))
        if known is not None and stages > len(known.holding):
            continue
        for count in [int(said["microbatches"])] if "microbatches" in said else _counts(request, degree):
            if schedule.refusal(Shape(degree, stages, count)) is None:
                yield {"schedule": name, "microbatches": count}


def _counts(request: SearchRequest, degree: int) -> list[int]:
    """Numbers of microbatches: those that fill the pipeline, at least twice as many each time.

    Then, where ranks that wait leave their cores to the others, so that filling it may not pay, also fewer.  All that there are
    where all are asked for.
    """
    if _rowless(request) is not None:
        return [1]
    every = divisors(request.batch_size)
    if request.exhaustive:
        return every
    found = [count for count in every if count >= degree] or every[-1:]
    kept: list[int] = []
    for count in found:
        if not kept or count >= 2 * kept[-1] or count == every[-1]:
            kept.append(count)
    if request.pipeline.shared_cores:
        for count in reversed(every):
            if 2 * count <= min(kept):
                kept.append(count)
    return kept


def _rowless(request: SearchRequest) -> CannotSplit | None:
    """What keeps a batch from being cut: a module that makes something of all rows; None for nothing."""
    known = survey_of(request)
    if known is None:
        return None
    found = (
        made for made, taken in request.pipeline.scalar_flows if known.unit(made) and not known.unit(taken)
    )
    first = min(found, default=None)
    if first is not None:
        why = (
            f"module {first!r} makes a number of the rows that it is given, which code outside takes: what it is for the whole "
            "batch cannot be known from microbatches"
        )
        return CannotSplit(why, "compute it outside of the module, or take one")
    norm = known.normalising
    if norm is None:
        return known.rowless(request.pipeline.example)
    return CannotSplit(
        f"module {norm!r} normalises by the whole batch, which microbatches would change",
        "take one, or eval() if it keeps running statistics",
    )


def single_microbatch_note(request: SearchRequest) -> str | None:
    """Why there is one microbatch, in a line; None where there may be more."""
    rowless = _rowless(request)
    if rowless is None:
        return None
    return f"pipeline: one microbatch, so that its ranks compute one after the other: {rowless.why}"


def possible_degrees(request: SearchRequest) -> list[int]:
    """Degrees for which there are ranks, rows and modules enough."""
    known = survey_of(request)
    most = request.batch_size if known is None else min(request.batch_size, len(known.holding))
    return [degree for degree in divisors(request.world_size) if degree <= max(1, most)]


def degree_refusal(request: SearchRequest, degree: int) -> str | None:
    """Why a degree that divides the ranks is not among those that are possible."""
    known = survey_of(request)
    if request.world_size % degree:
        return None
    if known is not None and degree > len(known.holding):
        names = [unit for unit in known.units if unit in known.holding]
        return (
            f"each stage needs a module with parameters, and this model has {len(names)} that can be given to one "
            f"({listing(names, 4)}): the members of a ModuleList or Sequential of like modules, and every other module with "
            "parameters that holds no such list; keep layers in such lists, or take a smaller degree"
        )
    if degree > request.batch_size:
        return (
            f"each stage needs a microbatch to work on, and a pipeline has {request.batch_size} rows to cut; give more rows, or "
            "take a smaller degree"
        )
    return None


def microbatches(request: SearchRequest, degree: int) -> int:
    """How many the batch is cut into: what the user said, else up to PER_STAGE for each stage.

    Raises:
        PlanError: the rows cannot be cut so.
    """
    said = request.options.get("microbatches")
    rowless = _rowless(request)
    if said is not None and int(said) > 1 and rowless is not None:
        raise PlanError("pipeline.microbatches", int(said), str(rowless), "1")
    if said is not None:
        return _checked(int(said), request)
    if rowless is not None:
        return 1
    return max(d for d in divisors(request.batch_size) if d <= PER_STAGE * degree)


def _checked(count: int, request: SearchRequest) -> int:
    rows = request.batch_size
    if count < 1 or rows % count:
        others = [f"{axis} {n}" for axis, n in request.step.degrees.items() if n > 1 and axis != "pp"]
        beside = f" beside {' x '.join(others)}" if others else ""
        many = f"{rows} row{'s' if rows != 1 else ''}"
        rule = f"the {many} that one pipeline takes in a step{beside} cannot be cut into {count} equal microbatches"
        nearest = min(divisors(rows), key=lambda d: (abs(d - count), d))
        raise PlanError("pipeline.microbatches", count, rule, str(nearest))
    return count
