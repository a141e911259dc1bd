"""Alpa's search: an integer program inside operators, dynamic programming between them.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022.

Equations of the paper, and their place in this code:

- Intra-operator (section 4): for every logical mesh of a stage (data axis x operator axis) an integer program chooses the
  placements: `Search.evaluate`, the program of `placement/problem.py`. Alpa's post-ILP optimization rewrites sums of
  gradients into reduce-scatter and all-gather. Here that is ZeRO stage 2 along `zero`, where the memory requires it.
- Inter-operator (section 5): T* = min over stages and meshes of sum t_i + (B - 1) max t_i, equation 2: `latency`. t_i is
  the compute and communication of stage i for one microbatch. Plans of this package give all stages meshes of one shape, so
  the sum does not depend on the cuts. The optimum is the cut with the least max t_i, as the pipeline strategy finds it.
- A stage fits where memory + s x activations fits (equation 5; s: microbatches in flight): the planner's memory model.

As published: 1F1B, B given (here: of the request, else the largest that the pipeline offers), no context or expert axis.
The step time of the chosen plan is predicted with the costs that all planners share.
"""

from __future__ import annotations

from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.base import AlternativePlanner, Costs
from meshwright_planner.search.explore import Choice

AXES = ("pp", "dp", SHARED, "tp")
"""Stages, and the two axes of a stage's logical mesh. Ranks along zero are data ranks."""

SCHEDULE = "1f1b"


class AlpaPlanner(AlternativePlanner):
    """Tries every stage count and logical mesh, and takes the least latency by Alpa's formula."""

    name: ClassVar[str] = "alpa"

    def choose(self, search: Search, request: PlanRequest) -> Choice:
        """See AlternativePlanner."""
        pinned = {axis for axis, degree in search.setting.pins.items() if degree > 1}
        costs = Costs(search)
        candidates: list[Candidate] = []
        legal = search.combinations()
        for degrees in legal:
            foreign = any(d > 1 and axis not in AXES and axis not in pinned for axis, d in degrees.items())
            # gradients are scattered over all data ranks
            partly = degrees.get(SHARED, 1) > 1 and degrees.get("dp", 1) > 1 and SHARED not in pinned
            if foreign or partly:
                continue
            if candidates and costs.late():
                break
            if (candidate := self._logical_mesh(costs, degrees)) is not None:
                candidates.append(candidate)
        if not candidates:
            raise costs.refused or UsageError(
                "planner='alpa' only uses pp, dp and tp, and no combination of these is legal; "
                "change the pins, the batch size or world_size"
            )
        chosen = min(candidates, key=lambda c: (c.excess_bytes, round(latency(c), 12), *rank(c)))
        others = sorted((c for c in candidates if c is not chosen), key=rank)
        note = (
            f"alpa: {len(candidates)} stage counts and logical meshes, {len(costs.exact)} integer programs; "
            f"chosen by sum t + (B - 1) max t{costs.ending}"
        )
        return Choice(search, [chosen, *others], legal, (note,))

    def _logical_mesh(self, costs: Costs, degrees: dict[str, int]) -> Candidate | None:
        """The best candidate for these degrees: without recompute if that fits, else with full recompute."""
        search = costs.search
        stage = search.setting.stage or (2 if degrees.get(SHARED, 1) > 1 else 0)
        # 1F1B where it is offered, with the most microbatches
        ways = search.ways(degrees)
        preferred = [w for w in ways if w.get("schedule", SCHEDULE) == SCHEDULE] or ways or [{}]
        way = max(preferred, key=lambda w: int(str(w.get("microbatches", 1))))
        fixed = search.setting.recompute
        plain = costs.evaluate(Point.of(degrees, stage, way, fixed))
        fits = plain is not None and not plain.excess_bytes
        if fits or fixed is not None or "full" not in search.can_recompute(degrees):
            return plain
        both = (plain, costs.evaluate(Point.of(degrees, stage, way, "full")))
        return min((c for c in both if c is not None), key=lambda c: c.excess_bytes, default=None)


def latency(candidate: Candidate) -> float:
    """Seconds of a step by equation 2, with the sum of gradients in the last microbatch.

    The first microbatch passes through all stages, each with its own compute and its own collectives inside of operators; each of
    the others adds the seconds of the busiest rank.
    """
    count = candidate.point.microbatches
    computed, sent = candidate.placement.compute_seconds / count, sum(candidate.inside.values())
    # as parts of the whole model's; a strategy that does not say where its collectives are has them where it computes
    compute = [sum(passes) for passes in candidate.stages]
    communication = [sum(passes) for passes in candidate.stage_communication] or compute
    late = computed * candidate.between + sent * candidate.between_communication
    all_stages = computed * sum(compute) + sent * sum(communication) + late / count
    inside = sum(s for axis, s in candidate.exposed.items() if axis in candidate.searched)
    busiest = (candidate.compute_seconds + inside) / count
    return all_stages + (count - 1) * busiest + candidate.exposed_seconds - inside
