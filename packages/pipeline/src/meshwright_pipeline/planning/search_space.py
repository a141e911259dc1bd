"""The search space of a pipeline: degrees, schedules, and numbers of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright_dtensor.errors import PlanError, PluginError, UsageError
from meshwright_dtensor.plugins import ScheduleSpec, discover
from meshwright_dtensor.schedule.registry import schedule_named
from meshwright_dtensor.schedule.schedule import Shape
from meshwright_dtensor.strategy import SearchRequest, divisors
from meshwright_dtensor.utils.names import count_of
from meshwright_pipeline.analysis.row_mixing import CannotSplit
from meshwright_pipeline.planning.survey import survey_of

PER_STAGE = 4
"""Microbatches per stage by default. The bubble of 1f1b is then about a fifth."""


def pipeline_choices(request: SearchRequest, degree: int) -> Iterator[dict[str, Any]]:
    """Each installed schedule that accepts a pipeline of this degree, with the numbers of microbatches to try.

    Options that the user set are kept. Schedules that cannot be loaded are skipped, unless the user named them.
    """
    options, survey = request.options, survey_of(request)
    installed = discover().all(ScheduleSpec) if survey is None else survey.installed
    for name in [options["schedule"]] if "schedule" in options else list(installed):
        try:
            schedule = schedule_named(name) if survey is None else survey.schedule(name)
        except (PluginError, UsageError):
            if name in options.values():
                raise
            continue
        stages = degree * (schedule.stages_each if survey is None else survey.stages_each(schedule, degree))
        if survey is not None and stages > survey.most:
            continue
        pinned = "microbatches" in options
        for count in [int(options["microbatches"])] if pinned else _counts(request, degree):
            if schedule.refusal(Shape(degree, stages, count)) is None:
                yield {"schedule": name, "microbatches": count}


def _counts(request: SearchRequest, degree: int) -> list[int]:
    """Numbers of microbatches to try: those that fill the pipeline, each at least twice the previous one.

    Smaller numbers follow if ranks share cores: waiting ranks leave their cores to others, so a full pipeline may not pay.
    All divisors if the search is exhaustive.
    """
    if _cannot_split(request) is not None:
        return [1]
    divisors_of_rows = divisors(request.batch_size)
    if request.exhaustive:
        return divisors_of_rows
    counts: list[int] = []
    for count in [n for n in divisors_of_rows if n >= degree] or divisors_of_rows[-1:]:
        if not counts or count >= 2 * counts[-1] or count == divisors_of_rows[-1]:
            counts.append(count)
    if request.pipeline.shared_cores:
        for count in reversed(divisors_of_rows):
            if 2 * count <= min(counts):
                counts.append(count)
    return counts


def _cannot_split(request: SearchRequest) -> CannotSplit | None:
    """Why the batch cannot be split into microbatches; None if it can."""
    survey = survey_of(request)
    if survey is None:
        return None
    flows = request.pipeline.scalar_flows
    scalars = (source for source, user in flows if survey.unit(source) and not survey.unit(user))
    first = min(scalars, default=None)
    if first is not None:
        why = (
            f"module {first!r} computes a scalar from its rows, which code outside uses: its value for the whole batch cannot be "
            "computed from microbatches"
        )
        return CannotSplit(why, "compute it outside of the module, or use one microbatch")
    reason = survey.whole_batch
    if reason is None:
        return survey.row_mixing(request.pipeline.example)
    return CannotSplit(reason, "use one microbatch, or eval() if it keeps running statistics")


def single_microbatch_note(request: SearchRequest) -> str | None:
    """A one-line note why there is one microbatch; None if there may be more."""
    reason = _cannot_split(request)
    if reason is None:
        return None
    return f"pipeline: one microbatch, so that its ranks compute one after the other: {reason.why}"


def possible_degrees(request: SearchRequest) -> list[int]:
    """Degrees for which there are enough ranks, rows and modules."""
    survey = survey_of(request)
    most = request.batch_size if survey is None else min(request.batch_size, survey.most)
    return [degree for degree in divisors(request.world_size) if degree <= max(1, most)]


def degree_refusal(request: SearchRequest, degree: int) -> str | None:
    """Why a degree that divides the ranks is not possible; None if it is, or if it does not divide them."""
    survey = survey_of(request)
    if request.world_size % degree:
        return None
    if survey is not None and degree > survey.most:
        return survey.too_few(survey.holding)
    if degree > request.batch_size:
        return (
            f"each stage needs a microbatch, and the batch of a pipeline has {count_of(request.batch_size, 'row')}. Use more rows, "
            "or a smaller degree"
        )
    return None


def microbatches(request: SearchRequest, degree: int) -> int:
    """Microbatches: pinned, or up to PER_STAGE for each stage. Raises PlanError: the rows cannot be split into so many."""
    pinned = request.options.get("microbatches")
    reason = _cannot_split(request)
    if pinned is not None and int(pinned) > 1 and reason is not None:
        raise PlanError("pipeline.microbatches", int(pinned), str(reason), "1")
    rows = request.batch_size
    if pinned is None:
        return 1 if reason is not None else max(d for d in divisors(rows) if d <= PER_STAGE * degree)
    count = int(pinned)
    if count < 1 or rows % count:
        others = [f"{axis} {n}" for axis, n in request.step.degrees.items() if n > 1 and axis != "pp"]
        shares = f" with {' x '.join(others)}" if others else ""
        whole = f"the {count_of(rows, 'row')} of a pipeline in a step{shares}"
        rule = f"{whole} cannot be split into {count} equal microbatches"
        nearest = min(divisors(rows), key=lambda d: (abs(d - count), d))
        raise PlanError("pipeline.microbatches", count, rule, str(nearest))
    return count
