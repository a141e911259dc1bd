"""Pipelines: any model cut into stages, without a graph, in the loop of one device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright_dtensor.utils.exports import load_on_first_use

if TYPE_CHECKING:
    from meshwright_dtensor.schedule.schedule import Action as Action
    from meshwright_dtensor.schedule.schedule import Schedule as Schedule
    from meshwright_dtensor.schedule.schedule import Shape as Shape
    from meshwright_dtensor.schedule.timetable import timetable as timetable
    from meshwright_pipeline.install.api import pipeline as pipeline
    from meshwright_pipeline.install.division import call_of as call_of
    from meshwright_pipeline.timeline import write_trace as write_trace

__version__ = "0.1.0"

# module -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        "meshwright_dtensor.schedule.schedule": "Action, Schedule, Shape",
        "meshwright_dtensor.schedule.timetable": "timetable",
        ".install.api": "pipeline",
        ".install.division": "call_of",
        ".timeline": "write_trace",
    },
)
__all__ = sorted([*__all__, "__version__"])
