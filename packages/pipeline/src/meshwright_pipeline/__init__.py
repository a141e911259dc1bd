"""Pipelines: any model cut into stages, without a graph, in the loop of one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_dtensor.schedule.schedule import Action as Action
    from meshwright_dtensor.schedule.schedule import Schedule as Schedule
    from meshwright_dtensor.schedule.schedule import Shape as Shape
    from meshwright_dtensor.schedule.timetable import timetable as timetable
    from meshwright_pipeline.install.api import pipeline as pipeline
    from meshwright_pipeline.install.division import call_of as call_of
    from meshwright_pipeline.timeline import write_trace as write_trace

__version__ = "0.1.0"

_EXPORTS = {
    "Action": "meshwright_dtensor.schedule.schedule",
    "Schedule": "meshwright_dtensor.schedule.schedule",
    "Shape": "meshwright_dtensor.schedule.schedule",
    "call_of": "meshwright_pipeline.install.division",
    "pipeline": "meshwright_pipeline.install.api",
    "write_trace": "meshwright_pipeline.timeline",
    "timetable": "meshwright_dtensor.schedule.timetable",
}

__all__ = sorted([*_EXPORTS, "__version__"])


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'meshwright_pipeline' has no attribute {name!r}")
    return getattr(importlib.import_module(_EXPORTS[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
