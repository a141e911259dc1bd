"""FlexFlow's search: a Markov chain over configurations with Metropolis-Hastings acceptance.

Jia, Zaharia and Aiken, "Beyond Data and Model Parallelism for Deep Neural Networks", MLSys 2019, section 6: from each initial
strategy (data parallelism, and a random one) a random part of the strategy is replaced by a random value. The new one is
accepted with probability min(1, exp(beta (cost - new cost))). The chain ends when its budget is spent, or when the best has
not improved for half of the proposals so far.

Here a strategy is a configuration of the shared search space: degrees, ZeRO stage, schedule and microbatches, recompute. Its
placements come from the same integer program as for all planners, which FlexFlow does not have.
"""

from __future__ import annotations

import math
import random
from typing import ClassVar

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.plugins import PluginHost
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import SHARED
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.base import AlternativePlanner, Costs
from meshwright_planner.search.explore import Choice
from meshwright_planner.search.hill_climb import Legal

PROPOSALS = 1000
"""The most proposals of one chain."""

FEWEST = 100
"""Proposals before a chain may end because it does not improve."""

BETA = 30.0
"""A configuration that is slower by a part of 1 / BETA is accepted with probability 1 / e."""

EXACT = 3
"""Configurations that are evaluated exactly at the end, in addition to those requested."""


class McmcPlanner(AlternativePlanner):
    """Metropolis-Hastings over configurations. Deterministic for a seed, unless the time budget ends it.

    Args:
        host, rules: as for the default planner.
        seed: of the chain.
        proposals: the most of each chain.
    """

    name: ClassVar[str] = "mcmc"

    def __init__(
        self,
        host: PluginHost | None = None,
        rules: RuleBook | None = None,
        *,
        seed: int = 0,
        proposals: int = PROPOSALS,
    ) -> None:
        super().__init__(host, rules)
        self.seed, self.proposals = seed, proposals

    def choose(self, search: Search, request: PlanRequest) -> Choice:
        """See AlternativePlanner."""
        costs, generator = Costs(search), random.Random(self.seed)
        legal = search.combinations()
        made = 0
        most_data = max(legal, key=lambda d: (d.get("dp", 1), d.get(SHARED, 1), tuple(d.values())))
        for start in (most_data, generator.choice(legal)):
            stage, ways = search.setting.zero_stages(start)[0], search.ways(start) or [{}]
            point = Point.of(start, stage, ways[0], search.setting.recompute)
            made += self._chain(costs, legal, point, generator)
        estimates = sorted((c for c in costs.estimates.values() if c is not None), key=_cost)
        if not estimates:
            raise costs.refused or UsageError("planner='mcmc': no configuration is legal; change the pins")
        exact = [costs.evaluate(c.point) for c in estimates[: request.top_k + EXACT]]
        costed = f"{len(costs.estimates)} configurations costed{costs.ending}"
        note = f"mcmc: {made} proposals in two chains (seed {self.seed}), {costed}"
        return Choice(search, sorted((c for c in exact if c is not None), key=rank), legal, (note,))

    def _chain(self, costs: Costs, legal: Legal, now: Point, generator: random.Random) -> int:
        """Run one chain; returns the number of its proposals."""
        here = _cost(costs.estimate(now))
        best, improved, made = here, 0, 0
        while made < self.proposals and (made < FEWEST or made < 2 * improved) and not costs.late():
            made += 1
            point = _proposal(costs.search, legal, now, generator)
            there = _cost(costs.estimate(point))
            if _accepted(here, there, generator):
                now, here = point, there
            if here < best:
                best, improved = here, made
        return made


def _cost(candidate: Candidate | None) -> tuple[float, float]:
    """Excess bytes, then seconds: a candidate that does not fit is worse than all that do."""
    if candidate is None:
        return math.inf, math.inf
    return float(candidate.excess_bytes), candidate.step_seconds


def _accepted(here: tuple[float, float], there: tuple[float, float], generator: random.Random) -> bool:
    # always drawn, so that chains of one seed stay comparable
    draw = generator.random()
    if there <= here:
        return True
    index = 0 if there[0] != here[0] else 1
    if not math.isfinite(there[index]) or not here[index]:
        return False
    return draw < math.exp(-BETA * (there[index] / here[index] - 1.0))


def _proposal(search: Search, legal: Legal, now: Point, generator: random.Random) -> Point:
    """The present configuration with a random part replaced by a random value."""
    degrees = dict(now.degrees)
    part = generator.choice(("degrees", "degrees", "stage", "way", "recompute"))
    if part == "stage":
        return now.but(stage=generator.choice(search.setting.zero_stages(degrees)))
    if part == "recompute" and search.setting.recompute is not None:
        return now
    if part == "recompute":
        return now.but(recompute=generator.choice([None, *search.can_recompute(degrees)]))
    if part == "way":
        return now.but(way=generator.choice(search.ways(degrees) or [{}]))
    other = generator.choice(legal)
    stages, ways = search.setting.zero_stages(other), search.ways(other) or [{}]
    stage = now.stage if now.stage in stages else stages[0]
    way = dict(now.way) if dict(now.way) in ways else generator.choice(ways)
    return Point.of(other, stage, way, now.recompute)
