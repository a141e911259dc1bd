"""The parallel plan: how a model is parallelized, as a value that is read, edited, compared and saved as JSON. Torch-free."""

from meshwright_dtensor.plan.fields import ActivationRule as ActivationRule
from meshwright_dtensor.plan.fields import CompileRule as CompileRule
from meshwright_dtensor.plan.fields import ContextSharing as ContextSharing
from meshwright_dtensor.plan.fields import ExpertsRule as ExpertsRule
from meshwright_dtensor.plan.fields import ParameterRule as ParameterRule
from meshwright_dtensor.plan.fields import PipelineRule as PipelineRule
from meshwright_dtensor.plan.fields import PlannedCollective as PlannedCollective
from meshwright_dtensor.plan.fields import PrecisionRule as PrecisionRule
from meshwright_dtensor.plan.fields import Prediction as Prediction
from meshwright_dtensor.plan.fields import Provenance as Provenance
from meshwright_dtensor.plan.fields import RecomputeRule as RecomputeRule
from meshwright_dtensor.plan.fields import StageTime as StageTime
from meshwright_dtensor.plan.fields import StepSplit as StepSplit
from meshwright_dtensor.plan.fields import ZeroRule as ZeroRule
from meshwright_dtensor.plan.plan import ParallelPlan as ParallelPlan
