"""Alpa's search: an integer program inside of operators, dynamic programming between them.

Zheng et al., "Alpa: Automating Inter- and Intra-Operator Parallelism for Distributed Deep Learning", OSDI 2022.

Equations of the paper and where they are here:

- Intra-operator (section 4): for every logical mesh of a stage (its data axis x its operator axis) an integer program
  chooses the placements: `Search.evaluate`, the program of `placement/problem.py`.  Sums of gradients are rewritten into
  reduce-scatter and all-gather where memory asks for it (their post-ILP optimization): stage 2 along `zero`.
- Inter-operator (section 5): T* = min over stages and meshes of sum t_i + (B - 1) max t_i, equation 2: `latency`.  t_i is
  the compute and communication of stage i for one microbatch.  A plan here gives all stages meshes of one shape, and then
  the sum is the same wherever the model is cut: the optimum is the cut with the least max t_i, which is the dynamic
  program of the pipeline.
- A stage fits where memory + s x activations does, equation 5, s being the microbatches in flight: the planner's memory.

As published: 1F1B, B given (here: the request's, else the largest that the pipeline offers), no context or expert axis.
The step of the plan that it picks is predicted by the costs that all planners share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.base import ChoosingPlanner, Costs

AXES = ("pp", "dp", SHARED, "tp")
"""Stages, and the two axes of a stage's logical mesh; those along zero are data ranks too."""

SCHEDULE = "1f1b"


class AlpaPlanner(ChoosingPlanner):
    """Every stage count and logical mesh, each with its integer program; the least latency by Alpa's own formula."""

    name: ClassVar[str] = "alpa"

    def choose(self, search: Search, request: PlanRequest) -> tuple[Sequence[Candidate], str]:
        """See ChoosingPlanner."""
        pinned = {axis for axis, degree in search.setting.pins.items() if degree > 1}
        costs = Costs(search)
        found: list[Candidate] = []
        for degrees in search.combinations():
            if any(d > 1 and axis not in AXES and axis not in pinned for axis, d in degrees.items()):
                continue
            if degrees.get(SHARED, 1) > 1 and degrees.get("dp", 1) > 1 and SHARED not in pinned:
                continue  # what is scattered is scattered over all data ranks
            if found and costs.late():
                break
            candidate = self._logical_mesh(costs, degrees)
            if candidate is not None:
                found.append(candidate)
        if not found:
            raise costs.refused or UsageError(
                "planner='alpa' knows stages, data and operators only, and no combination of pp, dp and tp is legal; "
                "change the pins, the batch size or world_size"
            )
        chosen = min(found, key=lambda c: (c.excess_bytes, round(latency(c), 12), *rank(c)))
        others = sorted((c for c in found if c is not chosen), key=rank)
        return [chosen, *others], (
            f"alpa: {len(found)} stage counts and logical meshes, {len(costs.exact)} integer programs; "
            f"chosen by sum t + (B - 1) max t{costs.ending}"
        )

    def _logical_mesh(self, costs: Costs, degrees: dict[str, int]) -> Candidate | None:
        """The best for these degrees: nothing recomputed if that fits, else layers in full."""
        search = costs.search
        stage = search.setting.stage or (2 if degrees.get(SHARED, 1) > 1 else 0)
        way = _way(search.ways(degrees))
        fixed = search.setting.recompute
        policies = (
            [fixed]
            if fixed is not None
            else [None, *(p for p in search.can_recompute(degrees) if p == "full")]
        )
        best = None
        for policy in policies:
            candidate = costs.evaluate(Point.of(degrees, stage, way, policy))
            if candidate is not None and (best is None or candidate.excess_bytes < best.excess_bytes):
                best = candidate
            if best is not None and not best.excess_bytes:
                break
        return best


def _way(ways: Sequence[dict[str, object]]) -> dict[str, object]:
    """1F1B where it is offered, with the most microbatches."""
    own = [w for w in ways if w.get("schedule", SCHEDULE) == SCHEDULE] or list(ways) or [{}]
    return max(own, key=lambda w: int(str(w.get("microbatches", 1))))


def latency(candidate: Candidate) -> float:
    """Seconds of a step by equation 2, the sum of gradients included in the last microbatch.

    Compute and the communication inside of operators are those of the slowest stage for all microbatches.
    """
    count = candidate.point.microbatches
    inside = sum(s for axis, s in candidate.exposed.items() if axis in candidate.searched)
    slowest = (candidate.compute_seconds + inside) / count
    shares = [sum(pair) for pair in candidate.stages] or [1.0]
    shares[-1] += candidate.between / count
    every = slowest * sum(shares) / max(shares)
    others = candidate.exposed_seconds - inside
    return every + (count - 1) * slowest + others
