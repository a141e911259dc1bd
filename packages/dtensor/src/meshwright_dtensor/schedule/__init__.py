"""Pipeline schedules: the interface, the installed ones by name, and the check that one can run."""

from __future__ import annotations

from meshwright_dtensor.schedule.schedule import Action, Schedule, Shape
from meshwright_dtensor.schedule.timetable import Timetable

__all__ = ["Action", "Schedule", "Shape", "Timetable"]
