"""Installed schedules by name."""

from __future__ import annotations

import functools
from typing import Any

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost, ScheduleSpec, discover
from meshwright_pipeline.schedule.schedule import Schedule


def schedule_named(name: str, host: PluginHost | None = None) -> Schedule:
    """The installed schedule of this name; `host`: where it is looked for, None discovers what is installed now.

    Raises:
        PluginError: it is not installed.
        UsageError: it is no Schedule.
    """
    target = (host or discover()).get(ScheduleSpec, name).load()
    made = _made(target) if isinstance(target, type) else target
    if not isinstance(made, Schedule):
        raise UsageError(
            f"schedule {name!r} is a {type(made).__name__}; it has to be a meshwright_pipeline.Schedule"
        )
    return made


@functools.cache
def _made(target: type[Any]) -> Any:
    """One of each class: schedules are stateless, and what is known of one is kept by its identity."""
    return target()
