"""The planner of meshwright: plans from one eager run of a model, with reasons. Names load on first use."""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshwright_planner.api import plan
    from meshwright_planner.planners.eager import EagerPlanner
    from meshwright_planner.planners.manual import ManualPlanner
    from meshwright_planner.reports.explain import explain
    from meshwright_planner.reports.module_profile import ModelProfile, ModuleProfile, profile_model

__all__ = [
    "EagerPlanner",
    "ManualPlanner",
    "ModelProfile",
    "ModuleProfile",
    "explain",
    "plan",
    "profile_model",
]

_EXPORTS = MappingProxyType(
    {
        "plan": "api",
        "explain": "reports.explain",
        "EagerPlanner": "planners.eager",
        "ManualPlanner": "planners.manual",
        "ModelProfile": "reports.module_profile",
        "ModuleProfile": "reports.module_profile",
        "profile_model": "reports.module_profile",
    }
)


def __getattr__(name: str) -> Any:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{module}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
