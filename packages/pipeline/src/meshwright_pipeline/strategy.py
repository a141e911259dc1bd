"""Pipeline parallelism: ranks along the axis `pp` share the modules of a model, and microbatches pass from one to the next."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.strategy import Division, Link, SearchRequest, Strategy, StrategyCost, Survey

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.plan import ParallelPlan


class Pipeline(Strategy):
    """Each rank holds its stages; the other axes of the mesh work inside of a stage."""

    name: ClassVar[str] = "pipeline"
    axis: ClassVar[str] = "pp"
    order: ClassVar[int] = 5
    optional: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    def survey(self, model: nn.Module) -> Survey | None:
        """The modules that can be given to stages."""
        from meshwright_pipeline.balance import survey

        return survey(model)

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Only what is pinned: the search does not try pipelines by itself."""
        pinned = request.pins.get(self.axis, 1)
        return [pinned] if request.world_size % pinned == 0 else [1]

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """The slowest stage sets the pace; filling and draining cost a stage's time for every stage but one."""
        from meshwright_pipeline.balance import cost

        return cost(request, degree, link) if degree > 1 else StrategyCost()

    def check(self, model: nn.Module, plan: ParallelPlan) -> None:
        """See Strategy."""
        from meshwright_pipeline.checks import check_division

        check_division(model, plan)

    def divide(self, model: nn.Module, plan: ParallelPlan, mesh: DeviceMesh) -> Division:
        """See Strategy."""
        from meshwright_dtensor.precision import DTYPES
        from meshwright_pipeline.division import StageDivision

        assert plan.pipeline is not None
        dtype = DTYPES["fp32" if plan.precision is None else plan.precision.parameters]
        return StageDivision(model, plan.pipeline, mesh.get_group(self.axis), dtype)
