"""Expert parallelism: experts are shared along the axis `ep`, and every token is sent to the ranks that have its experts.

For everything but experts `ep` is a data axis: the rows of the batch are shared along it, and the gradients of all other
parameters are summed over it. A plan says which modules hold experts (`plan.experts`) and shards their parameters
("ep": "S(0)"); the strategy finds both while planning, and does what the plan says when it is applied.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.intervals import single_owner_shard
from meshwright_dtensor.strategy.strategy import (
    CollectiveUse,
    GradientKind,
    Link,
    Phase,
    SearchRequest,
    Stall,
    Strategy,
    StrategyCost,
    Survey,
    divisors,
    planned_state,
    rows_state,
)
from meshwright_dtensor.utils.names import listing

if TYPE_CHECKING:
    from torch import nn
    from torch.distributed.device_mesh import DeviceMesh

    from meshwright_dtensor.plan.plan import ParallelPlan
    from meshwright_dtensor.sharding.states import State
    from meshwright_parallel.moe.detect import Detection


PASSES: tuple[tuple[Phase, str], ...] = (("forward", "tokens"), ("backward", "gradients"))


class Expert(Strategy):
    """Batch inputs are S(0); experts are S(0) and get their tokens by all-to-all; other parameters are X."""

    name: ClassVar[str] = "expert"
    axis: ClassVar[str] = "ep"
    order: ClassVar[int] = 30
    gradient: ClassVar[GradientKind] = "deferred"
    optional: ClassVar[bool] = True

    # ---- planning
    def survey(self, model: nn.Module) -> Survey | None:
        """The modules of experts, proved on small copies of them."""
        from meshwright_parallel.moe.detect import detect
        from meshwright_parallel.moe.plan_rules import notes_of, parameters_of

        found = detect(model)
        return Survey(
            parameters=frozenset(parameters_of(found)),
            modules=tuple(e.candidate.name for e in found.experts),
            notes=notes_of(found),
            details=found,
        )

    def degrees(self, request: SearchRequest) -> Iterable[int]:
        """Divisors of the number of experts that divide the batch; 1 where there are no experts."""
        count = _count(request)
        return [
            d for d in divisors(count or 1) if request.batch_size % d == 0 and request.world_size % d == 0
        ]

    def refusal(self, request: SearchRequest, degree: int) -> str | None:
        """Why this degree cannot be."""
        if not _count(request):
            notes = "; ".join(request.survey.notes) if request.survey is not None else ""
            return f"the model has no module of experts that could be shared{f' ({notes})' if notes else ''}; leave ep out"
        counts = sorted({e.candidate.count for e in _found(request).experts})
        if _count(request) % degree:
            return f"experts are shared equally, and {listing(map(str, counts))} experts do not divide by {degree}"
        return None

    def batch_factor(self, degree: int) -> int:
        """The local batch is a `degree`-th of the batch."""
        return degree

    def placements(self, survey: Survey, degrees: Mapping[str, int]) -> Mapping[str, Mapping[str, str]]:
        """How the parameters of experts lie on this axis."""
        from meshwright_parallel.moe.plan_rules import placements_of

        return placements_of(survey.details, degrees)

    def cost(self, request: SearchRequest, degree: int, link: Link) -> StrategyCost:
        """Tokens travel there and back, forward and backward, and nothing hides that; experts take a `degree`-th each.

        The sum of the other gradients over this axis is part of the one over all data axes, and costed there.
        """
        from meshwright_parallel.moe.plan_rules import all_divided_inside, rules_of

        found = _found(request)
        inside = request.degrees.get("tp", 1) if all_divided_inside(found, request.degrees) else 1
        width = {e.candidate.name: e.found.width for e in found.experts}
        moved = Counter(
            _moved(entering, width[name]) * degree for name, entering in request.entering.items() if entering
        )
        uses = [
            CollectiveUse("all_to_all", nbytes, 2 * count, phase, f"{what} of experts, there and back")
            for nbytes, count in moved.items()
            for phase, what in PASSES
        ]
        seconds = sum(use.count * link.seconds(use.kind, use.nbytes, degree) for use in uses)
        share = 1.0 / degree / inside
        return StrategyCost(
            exposed_seconds=seconds,
            stall=Stall(seconds / request.microbatches, 0.0, request.microbatches),
            parameters=_factor(request.parameter_bytes, request.own_bytes, share),
            gradients=_factor(request.gradient_bytes, request.own_gradient_bytes, share),
            optimizer=_factor(request.gradient_bytes, request.own_gradient_bytes, share),
            collectives=tuple(uses),
            fields={"experts": rules_of(found)},
        )

    # ---- applying
    def input_state(self, name: str, shape: Sequence[int], batch_size: int | None, degree: int) -> State:
        """S(0) where dim 0 is the batch and the degree divides it, else replicated."""
        return rows_state(shape, batch_size, degree)

    def parameter_state(self, fqn: str, shape: Sequence[int], plan: ParallelPlan, degree: int) -> State:
        """As the plan says: a container's child is owned by one rank; what no rule places is X.

        Raises:
            PlanError: a number of rows that the degree does not divide.
        """
        if plan.experts and degree > 1 and shape:
            from meshwright_parallel.moe.plan_rules import owner_of

            owner = owner_of(plan, fqn, degree)
            if owner is not None:
                return single_owner_shard(0, shape[0], degree, owner)
        state = planned_state(plan, fqn, self.axis)
        if isinstance(state, int) and int(state) == 0 and type(state) is int and shape and shape[0] % degree:
            rule = (
                f"experts are shared equally, and dim 0 of {fqn!r}, {shape[0]}, does not divide by {degree}"
            )
            near = max(d for d in divisors(shape[0]) if d <= degree)
            raise PlanError(f"degrees.{self.axis}", degree, rule, str(near))
        return "X" if state == "I" else state

    def attach(self, model: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Put the dispatch of tokens in the place of the forward of every module of experts."""
        from meshwright_parallel.moe.plan_rules import install

        if plan.degree(self.axis) > 1:
            install(model, plan, self.axis)


def _found(request: SearchRequest) -> Detection:
    if request.survey is None:
        from meshwright_parallel.moe.detect import Detection

        return Detection((), ())
    found: Detection = request.survey.details
    return found


def _count(request: SearchRequest) -> int:
    """The greatest common divisor of the numbers of experts; 0 where there are none."""
    return math.gcd(*(e.candidate.count for e in _found(request).experts))


def _moved(entering: Sequence[tuple[tuple[int, ...], int]], width: int) -> int:
    """Bytes of the rows that one rank sends: every token once for each of its experts, with a weight.

    Of what goes into the module, the tokens are [.., width] and the weights what is left: one for each row to send.
    """
    tokens = next(((shape, nbytes) for shape, nbytes in entering if shape and shape[-1] == width), None)
    if tokens is None:
        return 0
    shape, nbytes = tokens
    count = math.prod(shape[:-1])
    rows = max((math.prod(s) for s, _ in entering if s != shape and s and s[-1] != width), default=count)
    return rows * (nbytes // max(count, 1)) + rows * (nbytes // max(math.prod(shape), 1))


def _factor(whole: float, own: float, share: float) -> float:
    return 1.0 if whole <= 0 else max(0.0, (whole - own + own * share) / whole)
