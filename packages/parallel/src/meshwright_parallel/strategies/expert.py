"""Expert parallelism: experts are sharded along the axis `ep`, and every token is sent to the ranks that have its experts.

For all other modules `ep` is a data axis: the rows of the batch are sharded along it, and gradients are summed over it.
A plan says which modules hold experts (`plan.experts`) and shards their parameters ("ep": "S(0)"). Planning finds both by
probing the model.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.intervals import single_owner_shard
from meshwright_dtensor.strategy import CollectiveUse, Stall, StrategyCost, Survey, divisors, planned_state
from meshwright_dtensor.utils.names import listing
from meshwright_parallel.strategies.data import RowStrategy

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State
    from meshwright_dtensor.strategy import Link, Phase, SearchRequest
    from meshwright_parallel.moe.detect import Detection


PHASES: tuple[tuple[Phase, str], ...] = (("forward", "tokens"), ("backward", "gradients"))


class Expert(RowStrategy):
    """Batch inputs are S(0). Experts are S(0) and get their tokens by all-to-all. Other parameters are X."""

    name: ClassVar[str] = "expert"
    axis: ClassVar[str] = "ep"
    order: ClassVar[int] = 30
    optional: ClassVar[bool] = True

    # ---- planning
    def survey(self, model: nn.Module) -> Survey | None:
        """The modules of experts, found by probing small copies of them."""
        from meshwright_parallel.moe.detect import detect
        from meshwright_parallel.moe.plan_rules import notes_of, parameters_of

        detection = detect(model)
        names = tuple(e.candidate.name for e in detection.experts)
        parameters, notes = frozenset(parameters_of(detection)), notes_of(detection)
        return Survey(parameters=parameters, modules=names, notes=notes, details=detection)

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the number of experts that divide the batch; 1 where there are no experts."""
        return divisors(math.gcd(_count(request) or 1, request.batch_size, request.world_size))

    def refusal(self, request: SearchRequest, degree: int) -> str | None:
        """Why this degree is impossible, or None."""
        if not _count(request):
            notes = "; ".join(request.survey.notes) if request.survey is not None else ""
            return f"the model has no module of experts that can be sharded{f' ({notes})' if notes else ''}; leave ep out"
        counts = sorted({e.candidate.count for e in _detection(request).experts})
        if _count(request) % degree:
            return f"every rank needs equally many experts, and {degree} does not divide {listing(map(str, counts))} experts"
        return None

    def placements(self, survey: Survey, degrees: Mapping[str, int]) -> Mapping[str, Mapping[str, str]]:
        """Placements of the experts' parameters on this axis."""
        from meshwright_parallel.moe.plan_rules import placements_of

        return placements_of(survey.details, degrees)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """All-to-alls of the tokens, which nothing overlaps; each rank stores the experts divided by `degree`.

        The other gradients are summed over all data axes at once, and costed there.
        """
        from meshwright_parallel.moe.plan_rules import all_divided_inside, rules_of

        detection = _detection(request)
        divided = all_divided_inside(detection, request.step.degrees)
        inside = request.step.degrees.get("tp", 1) if divided else 1
        width = {e.candidate.name: e.proved.width for e in detection.experts}
        given = request.sizes.module_inputs.items()
        sizes = Counter(_sent_bytes(inputs, width[name]) * degree for name, inputs in given if inputs)
        uses = [
            CollectiveUse("all_to_all", nbytes, 2 * count, phase, f"{what} of experts, there and back")
            for nbytes, count in sizes.items()
            for phase, what in PHASES
        ]
        seconds = sum(use.count * link.seconds(use.kind, use.nbytes, degree) for use in uses)
        share = 1.0 / degree / inside
        return StrategyCost(
            exposed_seconds=seconds,
            stall=Stall(seconds / request.step.microbatches, 0.0, request.step.microbatches),
            parameters=_factor(request.sizes.parameter_bytes, request.sizes.surveyed_bytes, share),
            gradients=_factor(request.sizes.gradient_bytes, request.sizes.surveyed_gradient_bytes, share),
            optimizer=_factor(request.sizes.gradient_bytes, request.sizes.surveyed_gradient_bytes, share),
            collectives=tuple(uses),
            fields={"experts": rules_of(detection)},
        )

    # ---- applying
    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        """The plan's placement. One rank owns a container's child; a parameter without a placement is X.

        Raises PlanError: the degree does not divide the rows.
        """
        if plan.experts and degree > 1 and shape:
            from meshwright_parallel.moe.plan_rules import owner_of

            owner = owner_of(plan, fqn, degree)
            if owner is not None:
                return single_owner_shard(0, shape[0], degree, owner)
        state = planned_state(plan, fqn, self.axis)
        if isinstance(state, int) and int(state) == 0 and type(state) is int and shape and shape[0] % degree:
            rule = f"every rank needs equally many experts, and {degree} does not divide dim 0 of {fqn!r}, which is {shape[0]}"
            nearest = max(d for d in divisors(shape[0]) if d <= degree)
            raise PlanError(f"degrees.{self.axis}", degree, rule, str(nearest))
        return "X" if state == "I" else state

    def attach(self, model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Replace the forward of every module of experts by token dispatch."""
        from meshwright_parallel.moe.plan_rules import install

        if plan.degree(self.axis) > 1:
            install(model, plan, self.axis)


def _detection(request: SearchRequest) -> Detection:
    if request.survey is None:
        from meshwright_parallel.moe.detect import Detection

        return Detection((), ())
    detection: Detection = request.survey.details
    return detection


def _count(request: SearchRequest) -> int:
    """The greatest common divisor of the numbers of experts; 0 where there are none."""
    return math.gcd(*(e.candidate.count for e in _detection(request).experts))


def _sent_bytes(inputs: Sequence[tuple[tuple[int, ...], int]], width: int) -> int:
    """Bytes of the rows that one rank sends: each token once per expert, with a weight.

    Of the module's inputs, the tokens are [.., width], and the other tensor has one weight per row.
    """
    tokens = next(((shape, nbytes) for shape, nbytes in inputs if shape and shape[-1] == width), None)
    if tokens is None:
        return 0
    shape, nbytes = tokens
    count = math.prod(shape[:-1])
    rows = max((math.prod(s) for s, _ in inputs if s != shape and s and s[-1] != width), default=count)
    return rows * (nbytes // max(count, 1)) + rows * (nbytes // max(math.prod(shape), 1))


def _factor(total: float, experts: float, share: float) -> float:
    """Factor on one rank's memory when each rank stores `share` of the experts."""
    return 1.0 if total <= 0 else max(0.0, (total - experts + experts * share) / total)
