"""Installed schedules by name."""

from __future__ import annotations

import functools
from typing import Any

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_dtensor.schedule.schedule import Schedule


def schedule_named(name: str, host: PluginHost | None = None) -> Schedule:
    """The installed schedule of this name. `host`: the plugin host to search; None discovers what is installed now.

    Raises PluginError if no schedule of this name is installed, UsageError if the plugin's target is not a Schedule.
    """
    target = (host or discover()).get(ScheduleSpec, name).load()
    schedule = _instance(target) if isinstance(target, type) else target
    if not isinstance(schedule, Schedule):
        text = (
            f"schedule {name!r} is a {type(schedule).__name__}; it has to be a meshwright_pipeline.Schedule"
        )
        raise UsageError(text)
    return schedule


@functools.cache
def _instance(target: type[Any]) -> Any:
    """One instance per class: schedules are stateless, and caches elsewhere go by their identity."""
    return target()
