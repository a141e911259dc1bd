"""What planners share that choose configurations in a way of their own: the request before, the plans after."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.plugins import discover
from meshwright_dtensor.strategy import PlanRequest
from meshwright_planner.evaluation.candidate import Candidate, rank
from meshwright_planner.evaluation.configuration import Point
from meshwright_planner.evaluation.context import ended_by
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.plan_writer.notes import plan_of, reasons
from meshwright_planner.planners.eager import EagerPlanner, default_rules
from meshwright_planner.reports.infeasible import infeasible
from meshwright_planner.search.optimality import prove


class ChoosingPlanner(EagerPlanner):
    """A planner that says which configurations it looks at, and how it ranks them."""

    @abstractmethod
    def choose(self, search: Search, request: PlanRequest) -> tuple[Sequence[Candidate], str]:
        """Candidates that were evaluated exactly, best first, and how they were found, in a line.

        Raises:
            UsageError, PlanError: no configuration is legal.
        """

    def _plan(self, model: nn.Module, batch: Any, request: PlanRequest) -> list[ParallelPlan]:
        host = self._host or discover()
        setting = self.setting(model, batch, request, host)
        search = Search(setting, self._rules or default_rules())
        found, note = self.choose(search, request)
        fitting = [(place, c) for place, c in enumerate(found) if not c.excess_bytes]
        if not fitting:
            raise infeasible(search, sorted(found, key=rank))
        every = search.combinations()
        proof = prove(search, found, every)
        return [
            plan_of(
                setting,
                candidate,
                self.name,
                [*reasons(setting, found, place, only=len(every) == 1), note],
                proof,
            )
            for place, candidate in fitting[: request.top_k]
        ]


class Costs:
    """Configurations and what they cost, each asked for once.

    refused: the first refusal, for when nothing else is left.
    ended: the time budget ended the search.
    """

    def __init__(self, search: Search) -> None:
        self.search = search
        self.estimates: dict[Point, Candidate | None] = {}
        self.exact: dict[Point, Candidate | None] = {}
        self.refused: PlanError | None = None
        self.ended = False

    def late(self) -> bool:
        """Whether the time budget is spent; who asks stops looking."""
        over = time.monotonic() > self.search.end
        self.ended |= over
        return over

    @property
    def ending(self) -> str:
        """What to add to a note where the time budget ended the search."""
        return ended_by(self.search.setting.time_budget if self.ended else None)

    def estimate(self, point: Point) -> Candidate | None:
        """The estimate; None where a strategy refuses."""
        if point not in self.estimates:
            try:
                self.estimates[point] = self.search.estimate(point)
            except PlanError as refused:
                self.refused, self.estimates[point] = self.refused or refused, None
        return self.estimates[point]

    def evaluate(self, point: Point) -> Candidate | None:
        """The exact answer; None where a strategy refuses."""
        if point not in self.exact:
            try:
                self.exact[point] = self.search.evaluate(point)
            except PlanError as refused:
                self.refused, self.exact[point] = self.refused or refused, None
        return self.exact[point]
