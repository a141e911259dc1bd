"""The search: every combination of degrees of the installed strategies, each with its best placements and its cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from meshwright_dtensor.errors import UsageError
from meshwright_dtensor.states import State
from meshwright_dtensor.strategy import Link, Survey
from meshwright_planner import sequence
from meshwright_planner.basis import Basis
from meshwright_planner.candidate import Candidate
from meshwright_planner.combining import combinations
from meshwright_planner.costing import cost
from meshwright_planner.costs import AxisCosts
from meshwright_planner.legal import Legality, Rules
from meshwright_planner.memory import parameter_bytes, parameter_factor
from meshwright_planner.placement import Placement, PlacementProblem
from meshwright_planner.program import MemoryTerms
from meshwright_planner.quotient import quotient
from meshwright_planner.recording import record
from meshwright_planner.setting import Setting
from meshwright_planner.tape import Tape

PRICE = 1e-15
"""Seconds that a byte of memory is worth when there is enough of it: only breaks ties."""


class Search:
    """Evaluates candidates; a tape is recorded once per local batch, a placement problem built once per degree."""

    def __init__(
        self,
        setting: Setting,
        rules: Rules,
        tapes: dict[object, Tape] | None = None,
        surveyed: Mapping[str, Survey] | None = None,
    ) -> None:
        self.setting, self.rules = setting, rules
        self.tapes: dict[object, Tape] = {} if tapes is None else tapes
        self.basis = Basis(setting, surveyed)
        self.surveys = self.basis.surveys
        self._problems: dict[tuple[object, ...], PlacementProblem] = {}

    def variant(self, **changes: object) -> Search:
        """A search of a changed setting that shares what was recorded."""
        return Search(replace(self.setting, **changes), self.rules, self.tapes, self.surveys)  # type: ignore[arg-type]

    def combinations(self) -> list[dict[str, int]]:
        """Every legal combination of degrees: product equal to the world size, pins kept."""
        return combinations(self.basis)

    def evaluate(self, degrees: Mapping[str, int], stage: int | None = None) -> Candidate:
        """The best candidate with these degrees; where nothing fits the memory, the one that needs least.

        `stage`: what ranks along zero share; None takes that of the setting.
        """
        setting = self.setting if stage is None else replace(self.setting, stage=stage)
        if setting is not self.setting:
            return self.variant(stage=stage).evaluate(degrees)
        degrees = {axis: degrees.get(axis, 1) for axis in setting.strategies}
        tape = self.tape(degrees)
        axis = next((a for a, s in setting.strategies.items() if s.placement_search and degrees[a] > 1), None)
        degree = degrees[axis] if axis is not None else 1
        problem = self._problem(tape, degree, self.basis.link(degrees, axis), degrees)
        placement = self._place(problem)
        candidate = cost(self.basis, self.rules, degrees, axis, problem, placement)
        if candidate.excess_bytes and degree > 1:
            tight = problem.solve(self._tight(candidate), divide=False)
            if tight is not None:
                candidate = cost(self.basis, self.rules, degrees, axis, problem, tight)
            else:  # nothing fits: show the placement that comes closest
                least = problem.solve(MemoryTerms(1e-6, parameter_factor(setting.optimizer)), divide=False)
                closest = (
                    candidate
                    if least is None
                    else cost(self.basis, self.rules, degrees, axis, problem, least)
                )
                candidate = min(candidate, closest, key=lambda c: c.total_bytes)
        return candidate

    def tape(self, degrees: Mapping[str, int]) -> Tape:
        """The tape of one rank's part of the batch under these degrees."""
        batch = self.setting.batch
        key = tuple(self.basis.local_shape(name, tuple(t.shape), degrees) for name, t in batch.tensors())
        if key not in self.tapes:
            local = batch.map(lambda name, t: self.basis.local(name, t, degrees))
            self.tapes[key] = record(self.setting.model, local, self.rules.composites, self.setting.dtype)
        return self.tapes[key]

    def _problem(self, tape: Tape, degree: int, link: Link, degrees: Mapping[str, int]) -> PlacementProblem:
        surveyed = [axis for axis in self.surveys if degrees[axis] > 1]
        key = (id(tape), degree, link, *surveyed)
        if key not in self._problems:
            costs = AxisCosts(self.setting.cluster, link, degree)
            # what a strategy places itself is not for the search to place
            held: dict[str, State] = {name: "I" for a in surveyed for name in self.surveys[a].parameters}
            pins = {**held, **self.setting.stored} if degree > 1 else {}
            legality = Legality(
                tape, quotient(tape), self.rules, costs, tape.rows, pins, self.setting.sequence_parallel
            )
            self._problems[key] = PlacementProblem(legality, pins)
        return self._problems[key]

    def _place(self, problem: PlacementProblem) -> Placement:
        """The fastest placement that makes use of the axis: weights are sharded where they can be used sharded.

        On a tiny model any communication costs more than replicated compute, and the fastest placement would be to
        shard nothing; but a degree is there to divide the model.
        """
        factor = parameter_factor(self.setting.optimizer)
        if problem.costs.degree == 1:
            return problem.replicated()
        placement = problem.solve(MemoryTerms(PRICE, factor)) or problem.solve(
            MemoryTerms(PRICE, factor), divide=False
        )
        if placement is None:
            raise UsageError(
                "the placement search found no legal placement; check the pinned parameter placements"
                + sequence.needs(self.setting)
            )
        return placement

    def _tight(self, candidate: Candidate) -> MemoryTerms:
        priced = {"parameters", "gradients", "optimizer", "activations"}
        fixed = sum(size for part, size in candidate.memory.items() if part not in priced)
        outside = sum(
            p.numel() * p.element_size()
            for name, p in self.setting.model.named_parameters()
            if name not in candidate.problem.read_parameters
        )
        factor = parameter_factor(self.setting.optimizer)
        model, problem, placement = self.setting.model, candidate.problem, candidate.placement
        own = {
            a: parameter_bytes(model, problem, placement, s.parameters)[0] for a, s in self.surveys.items()
        }
        # of what is divided along other axes, which the problem sees whole
        elsewhere = sum((1 - 1 / candidate.degrees.get(axis, 1)) * size for axis, size in own.items())
        room = candidate.limit - fixed - (outside - elsewhere) * factor
        return MemoryTerms(PRICE, factor, max(1.0, room))
