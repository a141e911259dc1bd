"""The planner of meshwright: plans from one eager run of a model, with reasons. Names load on first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright_dtensor.utils.exports import load_on_first_use

if TYPE_CHECKING:
    from meshwright_planner.api import plan as plan
    from meshwright_planner.planners.eager import EagerPlanner as EagerPlanner
    from meshwright_planner.planners.manual import ManualPlanner as ManualPlanner
    from meshwright_planner.reports.explain import explain as explain
    from meshwright_planner.reports.module_profile import ModelProfile as ModelProfile
    from meshwright_planner.reports.module_profile import ModuleProfile as ModuleProfile
    from meshwright_planner.reports.module_profile import profile_model as profile_model

# module of this package -> the names that it defines
__all__, __getattr__, __dir__ = load_on_first_use(
    __name__,
    {
        ".api": "plan",
        ".planners.eager": "EagerPlanner",
        ".planners.manual": "ManualPlanner",
        ".reports.explain": "explain",
        ".reports.module_profile": "ModelProfile, ModuleProfile, profile_model",
    },
)
