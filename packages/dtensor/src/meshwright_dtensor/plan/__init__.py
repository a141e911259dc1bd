"""The parallel plan: how a model is parallelized, as a value that is read, edited, compared and saved as JSON. Torch-free."""

from meshwright_dtensor.plan.fields import (
    ActivationRule,
    ContextSharing,
    ExpertsRule,
    ParameterRule,
    PipelineRule,
    PlannedCollective,
    PrecisionRule,
    Provenance,
    RecomputeRule,
    ZeroRule,
)
from meshwright_dtensor.plan.plan import ParallelPlan
from meshwright_dtensor.plan.prediction import Prediction, StageTime, StepSplit

__all__ = [
    "ActivationRule",
    "ContextSharing",
    "ExpertsRule",
    "ParallelPlan",
    "ParameterRule",
    "PipelineRule",
    "PlannedCollective",
    "PrecisionRule",
    "Prediction",
    "Provenance",
    "RecomputeRule",
    "StageTime",
    "StepSplit",
    "ZeroRule",
]
