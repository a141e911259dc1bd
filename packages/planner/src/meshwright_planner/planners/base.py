"""The shared part of the planners that choose configurations in their own way, `alpa` and `mcmc`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import ended_by
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.planners.eager import EagerPlanner
from meshwright_planner.search.explore import Choice
from meshwright_planner.search.finalists import Estimates
from meshwright_planner.search.optimality import Proof, prove


class AlternativePlanner(EagerPlanner):
    """A planner with its own choice of configurations and its own ranking. Setting, costs and plans are the default planner's."""

    @abstractmethod
    def choose(self, search: Search, request: PlanRequest) -> Choice:
        """Candidates that were evaluated exactly, best first by the planner's own measure.

        Raises:
            UsageError, PlanError: no configuration is legal.
        """

    def proven(self, choice: Choice) -> tuple[list[Candidate], Proof]:
        """The candidates in the planner's own order, and a bound on all others."""
        return choice.ranked, prove(choice.search, choice.ranked, choice.legal)


class Costs:
    """Estimates and exact candidates by configuration, each computed once.

    Attributes:
        refused: the first refusal of a strategy, to be raised where nothing else is left.
        ended: the time budget ended the search.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.estimates: Estimates = {}
        self.exact: Estimates = {}
        self.refused: PlanError | None = None
        self.ended = False

    def late(self) -> bool:
        """Whether the time budget is spent, so that the planner stops searching."""
        over = time.monotonic() > self.search.end
        self.ended |= over
        return over

    @property
    def ending(self) -> str:
        """The end of a note where the time budget ended the search."""
        return ended_by(self.search.setting.time_budget if self.ended else None)

    def estimate(self, point: Point) -> Candidate | None:
        """The estimate of a configuration; None where a strategy refuses it."""
        return self._once(point, self.estimates, self.search.estimate)

    def evaluate(self, point: Point) -> Candidate | None:
        """The exact candidate of a configuration; None where a strategy refuses it."""
        return self._once(point, self.exact, self.search.evaluate)

    def _once(self, point: Point, cache: Estimates, make: Callable[[Point], Candidate]) -> Candidate | None:
        if point not in cache:
            try:
                cache[point] = make(point)
            except PlanError as error:
                self.refused, cache[point] = self.refused or error, None
        return cache[point]
