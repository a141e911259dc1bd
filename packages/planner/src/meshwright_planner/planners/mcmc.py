"""FlexFlow's search: a Markov chain over configurations, accepted by Metropolis and Hastings.

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6: from each initial
strategy (data parallelism, and one at random) a random part of the strategy is replaced by a random value; the new one is
accepted with probability min(1, exp(beta (cost - new cost))); the chain ends when its budget is spent or the best has not
improved for half of what was spent.

Here a strategy is a configuration of the search that all planners share: degrees, ZeRO stage, schedule and microbatches,
recomputation. Placements inside of it come from the same integer program as everywhere, which is more than FlexFlow has.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.placement.legal_rows import Rules
from meshwright_planner.planners.base import ChoosingPlanner, Costs

PROPOSALS = 1000
"""Proposals of one chain at most."""

FEWEST = 100
"""Proposals before a chain may end for want of improvement."""

BETA = 30.0
"""A configuration that is 1 / BETA slower than the present one is accepted once in e times."""

EXACT = 3
"""Configurations beyond those asked for that are evaluated exactly at the end."""


class McmcPlanner(ChoosingPlanner):
    """Metropolis over configurations. Deterministic for a seed, unless the request's time budget ends it.

    Args:
        host, rules: as for the default planner.
        seed: of the chain.
        proposals: of each chain at most.
    """

    name: ClassVar[str] = "mcmc"

    def __init__(
        self,
        host: PluginHost | None = None,
        rules: Rules | None = None,
        *,
        seed: int = 0,
        proposals: int = PROPOSALS,
    ) -> None:
        super().__init__(host, rules)
        self.seed, self.proposals = seed, proposals

    def choose(self, search: Search, request: PlanRequest) -> tuple[Sequence[Candidate], str]:
        """See ChoosingPlanner."""
        costs, generator = Costs(search), random.Random(self.seed)
        every = search.combinations()
        made = 0
        for start in (_most_data(every), generator.choice(every)):
            made += self._chain(costs, every, _configured(search, start), generator)
        known = sorted((c for c in costs.estimates.values() if c is not None), key=_cost)
        if not known:
            raise costs.refused or UsageError("planner='mcmc': no configuration is legal; change the pins")
        found = [costs.evaluate(c.point) for c in known[: request.top_k + EXACT]]
        return sorted((c for c in found if c is not None), key=rank), (
            f"mcmc: {made} proposals in two chains (seed {self.seed}), {len(costs.estimates)} configurations costed{costs.ending}"
        )

    def _chain(
        self,
        costs: Costs,
        every: Sequence[dict[str, int]],
        now: Point,
        generator: random.Random,
    ) -> int:
        """One chain; how many proposals it made."""
        here = _cost(costs.estimate(now))
        best, improved, made = here, 0, 0
        while made < self.proposals and (made < FEWEST or made < 2 * improved):
            if costs.late():
                break
            made += 1
            point = _proposal(costs.search, every, now, generator)
            there = _cost(costs.estimate(point))
            if _accepted(here, there, generator):
                now, here = point, there
            if here < best:
                best, improved = here, made
        return made


def _cost(candidate: Candidate | None) -> tuple[float, float]:
    """Bytes too many, then seconds: what does not fit is worse than all that does."""
    if candidate is None:
        return math.inf, math.inf
    return float(candidate.excess_bytes), candidate.step_seconds


def _accepted(here: tuple[float, float], there: tuple[float, float], generator: random.Random) -> bool:
    draw = generator.random()  # always drawn, so that chains of one seed stay comparable
    if there <= here:
        return True
    index = 0 if there[0] != here[0] else 1
    if not math.isfinite(there[index]) or not here[index]:
        return False
    return draw < math.exp(-BETA * (there[index] / here[index] - 1.0))


def _most_data(every: Sequence[dict[str, int]]) -> dict[str, int]:
    """Data parallelism as far as it goes."""
    return max(every, key=lambda d: (d.get("dp", 1), d.get(SHARED, 1), tuple(d.values())))


def _configured(search: Search, degrees: Mapping[str, int]) -> Point:
    ways = search.ways(degrees) or [{}]
    return Point.of(degrees, _stages(search, degrees)[0], ways[0], search.setting.recompute)


def _stages(search: Search, degrees: Mapping[str, int]) -> list[int]:
    if degrees.get(SHARED, 1) <= 1:
        return [0]
    return [search.setting.stage] if search.setting.stage else [2, 3]


def _proposal(search: Search, every: Sequence[dict[str, int]], now: Point, generator: random.Random) -> Point:
    """The present configuration with one part at random replaced by a value at random."""
    degrees = dict(now.degrees)
    part = generator.choice(("degrees", "degrees", "stage", "way", "recompute"))
    if part == "stage":
        return now.but(stage=generator.choice(_stages(search, degrees)))
    if part == "recompute":
        if search.setting.recompute is not None:
            return now
        return now.but(recompute=generator.choice([None, *search.can_recompute(degrees)]))
    if part == "way":
        return now.but(way=generator.choice(search.ways(degrees) or [{}]))
    other = generator.choice(every)
    stages, ways = _stages(search, other), search.ways(other) or [{}]
    stage = now.stage if now.stage in stages else stages[0]
    kept: dict[str, Any] = dict(now.way)
    way = kept if kept in ways else generator.choice(ways)
    return Point.of(other, stage, way, now.recompute)
