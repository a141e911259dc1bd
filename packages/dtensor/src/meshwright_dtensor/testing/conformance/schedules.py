"""Checks of a pipeline schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import Registered
from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.schedule.timetable import timetable
from meshwright_dtensor.testing.conformance.on_ranks import check_one_device, planned
from meshwright_dtensor.testing.conformance.report import (
    Check,
    Nonconformance,
    Tools,
    instance,
    require,
    sibling,
    told,
)


def schedule_of(plugin: Registered[Any]) -> Schedule:
    """The schedule."""
    made: Schedule = instance(plugin, Schedule, "meshwright_dtensor.schedule")
    return made


def shapes(plugin: Registered[Any], schedule: Schedule) -> Iterator[Shape]:
    """The pipelines, of several sizes, that the schedule does not refuse."""
    for ranks in (2, 3, 4):
        for each in {schedule.stages_each, max(schedule.stages_each, schedule.most_each)}:
            for microbatches in (1, 2, 3, 4, 6, 8, 12):
                shape = Shape(ranks, ranks * each, microbatches)
                fix = "return a sentence for a pipeline that it cannot run, else None"
                refusal = told(plugin, f"refusal({shape})", fix, schedule.refusal, shape)
                require(
                    refusal is None or (isinstance(refusal, str) and refusal),
                    plugin,
                    f"refusal({shape}) returned {refusal!r}",
                    fix,
                )
                if refusal is None:
                    yield shape


def check_class(plugin: Registered[Any], tools: Tools) -> None:
    """The target is a Schedule of that name, with numbers of stages."""
    schedule = schedule_of(plugin)
    for field, least in (("stages_each", 1), ("most_each", 0)):
        value = getattr(schedule, field)
        require(
            isinstance(value, int) and value >= least,
            plugin,
            f"{field} is {value!r}",
            f"give a number of stages of one rank, at least {least}",
        )


def check_owners(plugin: Registered[Any], tools: Tools) -> None:
    """Every stage is on a rank of the axis, and every rank has as many."""
    schedule = schedule_of(plugin)
    for shape in shapes(plugin, schedule):
        owners = [schedule.owner(stage, shape) for stage in range(shape.stages)]
        require(
            all(isinstance(owner, int) and 0 <= owner < shape.ranks for owner in owners)
            and all(owners.count(rank) == shape.each for rank in range(shape.ranks)),
            plugin,
            f"owner() deals the stages of {shape} to the ranks {owners}",
            f"give each of the ranks 0..{shape.ranks - 1} as many stages, here {shape.each}",
        )


def check_actions(plugin: Registered[Any], tools: Tools) -> None:
    """Every action comes once, no rank waits for ever, and two calls give the same order."""
    schedule, count = schedule_of(plugin), 0
    for shape in shapes(plugin, schedule):
        count += 1
        try:
            table = timetable(schedule, shape)
        except UsageError as error:
            raise Nonconformance(f"{error} (of {plugin.distribution}, for {shape})") from error
        except Exception as error:
            told(plugin, f"actions() for {shape}", "yield Action(kind, stage, microbatch)", _raising(error))
        again = tuple(tuple(schedule.actions(rank, shape)) for rank in range(shape.ranks))
        require(
            table.ranks == again,
            plugin,
            f"two calls of actions() for {shape} differ",
            "make the order depend on rank and shape alone: the ranks compute it separately and have to agree",
        )
    require(
        count,
        plugin,
        "it refuses every pipeline of 2 to 4 ranks and 1 to 12 microbatches",
        "let refusal(shape) return None where it can run",
    )


def _raising(error: Exception) -> Any:
    def call() -> None:
        raise error

    return call


def check_on_ranks(plugin: Registered[Any], tools: Tools) -> None:
    """Two stages on two real ranks: losses and gradients of one device."""
    schedule = schedule_of(plugin)
    purpose = "running a schedule"
    sibling("meshwright_pipeline", purpose)
    fitting = [s for s in shapes(plugin, schedule) if s.ranks == 2 and s.microbatches in (2, 4, 8)]
    require(
        fitting,
        plugin,
        "it refuses 2 ranks with 2, 4 and 8 microbatches",
        "let refusal(shape) return None for one of them: other numbers of microbatches divide few batches",
    )
    # several microbatches in flight are the harder case
    microbatches = next((s.microbatches for s in fitting if s.microbatches > 2), fitting[0].microbatches)
    plan = planned(plugin, purpose, pp=2, microbatches=microbatches, schedule=plugin.name)
    fix = "its order is legal, so look at owner() and at the stages that it assumes"
    check_one_device(plugin, tools, plan, purpose, fix)


CHECKS: tuple[Check, ...] = (check_class, check_owners, check_actions, check_on_ranks)
