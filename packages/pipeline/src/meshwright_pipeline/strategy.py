"""The strategy of pipeline parallelism: each rank of the axis `pp` holds some stages of the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from meshwright_dtensor.strategy import Division, Link, SearchRequest, Strategy, StrategyCost, Survey

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.plan import ParallelPlan


class Pipeline(Strategy):
    """Each rank holds its stages; the other axes of the mesh work inside a stage."""

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pp"
    order: ClassVar[int] = 5
    optional: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    def survey(self, model: nn.Module) -> Survey | None:
        """The modules that can be given to stages."""
        from meshwright_pipeline.planning.survey import survey

        return survey(model)

    def degrees(self, request: SearchRequest) -> list[int]:
        """Every degree for which there are ranks, rows and modules enough, ascending."""
        from meshwright_pipeline.planning.search_space import possible_degrees

        return possible_degrees(request)

    def refusal(self, request: SearchRequest, degree: int) -> str | None:
        """Too few modules that could be given to stages, or too few rows."""
        from meshwright_pipeline.planning.search_space import degree_refusal

        return degree_refusal(request, degree)

    def ways(self, request: SearchRequest, degree: int) -> Iterable[Mapping[str, Any]]:
        """Every installed schedule, with the numbers of microbatches to try."""
        from meshwright_pipeline.planning.search_space import pipeline_choices

        return pipeline_choices(request, degree) if degree > 1 else ({},)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """The cost of a simulated step of the schedule, with stages of even cost."""
        from meshwright_pipeline.planning.cost import cost

        return cost(request, degree, link) if degree > 1 else StrategyCost()

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """See Strategy."""
        from meshwright_pipeline.install.division import check_division

        check_division(model, plan)

    def divide(self, model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> Division:
        """See Strategy."""
        from meshwright_dtensor.model.precision import DTYPES
        from meshwright_pipeline.install.division import StageDivision

        assert plan.pipeline is not None
        dtype = DTYPES["fp32" if plan.precision is None else plan.precision.parameters]
        group = mesh.get_group(self.axis)
        return StageDivision(model, plan.pipeline, group, dtype, not plan.recompute, plan.predicted)
