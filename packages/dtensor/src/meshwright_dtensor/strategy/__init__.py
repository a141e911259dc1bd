"""The interfaces that plugins implement: `Strategy` and `Planner`, and what they are asked and answer. Torch-free."""

from meshwright_dtensor.cluster.links import CollectiveKind as CollectiveKind
from meshwright_dtensor.cluster.links import Link as Link
from meshwright_dtensor.strategy.cost import CollectiveUse as CollectiveUse
from meshwright_dtensor.strategy.cost import Peak as Peak
from meshwright_dtensor.strategy.cost import Phase as Phase
from meshwright_dtensor.strategy.cost import Stall as Stall
from meshwright_dtensor.strategy.cost import StrategyCost as StrategyCost
from meshwright_dtensor.strategy.plan_request import PlanKeywords as PlanKeywords
from meshwright_dtensor.strategy.plan_request import PlanRequest as PlanRequest
from meshwright_dtensor.strategy.plan_request import with_plan_keywords as with_plan_keywords
from meshwright_dtensor.strategy.planner import Planner as Planner
from meshwright_dtensor.strategy.request import AttentionUse as AttentionUse
from meshwright_dtensor.strategy.request import ModelSizes as ModelSizes
from meshwright_dtensor.strategy.request import ModuleWork as ModuleWork
from meshwright_dtensor.strategy.request import ParameterSize as ParameterSize
from meshwright_dtensor.strategy.request import PipelineQuery as PipelineQuery
from meshwright_dtensor.strategy.request import SearchRequest as SearchRequest
from meshwright_dtensor.strategy.request import StepContext as StepContext
from meshwright_dtensor.strategy.request import Survey as Survey
from meshwright_dtensor.strategy.strategy import Division as Division
from meshwright_dtensor.strategy.strategy import GradientKind as GradientKind
from meshwright_dtensor.strategy.strategy import Strategy as Strategy
from meshwright_dtensor.strategy.strategy import divisors as divisors
from meshwright_dtensor.strategy.strategy import planned_state as planned_state
from meshwright_dtensor.strategy.strategy import rows_state as rows_state
