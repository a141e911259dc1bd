"""The interfaces that plugins implement: `Strategy` and `Planner`, and what they are asked and answer. Torch-free."""

from meshwright_dtensor.cluster.links import CollectiveKind, Link
from meshwright_dtensor.strategy.cost import CollectiveUse, Peak, Phase, Stall, StrategyCost
from meshwright_dtensor.strategy.plan_request import PlanKeywords, PlanRequest, with_plan_keywords
from meshwright_dtensor.strategy.planner import Planner
from meshwright_dtensor.strategy.request import (
    AttentionUse,
    ModelSizes,
    ModuleWork,
    ParameterSize,
    PipelineQuery,
    SearchRequest,
    StepContext,
    Survey,
)
from meshwright_dtensor.strategy.strategy import (
    Division,
    GradientKind,
    Strategy,
    divisors,
    planned_state,
    rows_state,
)

__all__ = [
    "AttentionUse",
    "CollectiveKind",
    "CollectiveUse",
    "Division",
    "GradientKind",
    "Link",
    "ModelSizes",
    "ModuleWork",
    "ParameterSize",
    "Peak",
    "Phase",
    "PipelineQuery",
    "PlanKeywords",
    "PlanRequest",
    "Planner",
    "SearchRequest",
    "Stall",
    "StepContext",
    "Strategy",
    "StrategyCost",
    "Survey",
    "divisors",
    "planned_state",
    "rows_state",
    "with_plan_keywords",
]
