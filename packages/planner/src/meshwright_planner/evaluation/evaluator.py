"""The search's evaluator: what a configuration costs, with the best placements on its searched axes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import PipelineQuery, StepContext
from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import BY_STAGE, Point
from meshwright_planner.evaluation.context import Basis, Setting, Surveys
from meshwright_planner.evaluation.degrees import combinations, sequence_hint
from meshwright_planner.evaluation.memory_bound import least_bytes
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.evaluation.stage_recompute import Again
from meshwright_planner.evaluation.step_cost import cost, eased
from meshwright_planner.evaluation.tapes import Shared
from meshwright_planner.memory.parts import parameter_factor
from meshwright_planner.placement.ilp import MemoryTerms, Unsolved
from meshwright_planner.placement.legal_rows import Legality, Rules
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.placement.two_axes.legal_rows import JointLegality
from meshwright_planner.placement.two_axes.prices import JointCosts
from meshwright_planner.placement.two_axes.problem import JointProblem
from meshwright_planner.recompute.region import recomputed_blocks
from meshwright_planner.recompute.rules import POLICIES, recompute_rules, repeated_blocks
from meshwright_planner.trace.tape import Tape

PRICE = 1e-15
"""Seconds that a byte of memory is worth when there is enough of it: only breaks ties."""

LEAST_PATIENCE = 60.0
"""Seconds that a placement may take when the time of the search is over."""

FAR = 1.5
"""Times as long as what is out of the question anyway: then what a single row does differently makes no difference."""

Axes: TypeAlias = tuple[str, ...]
"""Names of searched axes, outermost first."""


class Search:
    """Evaluates configurations; tapes are shared, and a placement problem is built once for a tape and a degree."""

    def __init__(
        self,
        setting: Setting,
        rules: Rules,
        shared: Shared | None = None,
    ) -> None:
        self.setting, self.rules = setting, rules
        self.shared = Shared(Surveys(setting.model)) if shared is None else shared
        self.basis = Basis(setting, self.shared.surveys)
        self.surveys = self.basis.surveys
        self.evaluated = 0
        if self.shared.end is None:  # variants of a search share its time
            budget = setting.time_budget
            self.shared.end = math.inf if budget is None else time.monotonic() + budget
        self.end = self.shared.end
        self._placed: dict[tuple[object, ...], Placed] = {}
        self._models: dict[tuple[object, ...], Placed] = {}
        self._eased: dict[int, tuple[Placed, Again]] = {}
        # those with nothing run again that do not fit, exact and rough
        self._full: dict[tuple[Point, bool], tuple[Placed, Candidate]] = {}

    def variant(self, **changes: object) -> Search:
        """A search of a changed setting that shares what was recorded and solved: of the same model on the same cluster."""
        return Search(replace(self.setting, **changes), self.rules, self.shared)  # type: ignore[arg-type]

    def combinations(self) -> list[dict[str, int]]:
        """Every legal combination of degrees: product equal to the world size, pins kept."""
        return combinations(self.basis)

    def point(self, degrees: Mapping[str, int], stage: int | None = None) -> Point:
        """The configuration with these degrees, and everything else as the setting or the first way has it."""
        full = {axis: degrees.get(axis, 1) for axis in self.setting.strategies}
        shared = self.setting.stage if stage is None else stage
        ways = self.ways(full)
        return Point.of(full, shared, ways[0] if ways else {}, self.setting.recompute)

    def ways(self, degrees: Mapping[str, int], thorough: bool = False) -> list[dict[str, object]]:
        """What strategies let one choose with these degrees, those of the axes together; `thorough`: all that is legal."""
        found: list[dict[str, object]] = [{}]
        for axis, strategy in self.setting.strategies.items():
            if degrees[axis] > 1:
                rows = max(1, self.setting.batch.size // self.basis.batch_factor(degrees))
                tape = self._any_tape(degrees) if strategy.divides else None
                asked = replace(
                    self.basis.request(axis),
                    batch_size=rows,
                    step=StepContext(degrees=dict(degrees)),
                    exhaustive=thorough,
                    pipeline=PipelineQuery(
                        shared_cores=self.setting.cluster.shared_core_factors(degrees[axis])
                        if strategy.divides
                        else (),
                        scalar_flows=frozenset() if tape is None else tape.numbers,
                        calls=None if tape is None else tape.calls,
                        example=(self.setting.batch.args, self.setting.batch.kwargs)
                        if strategy.divides
                        else None,
                    ),
                )
                own = [dict(way) for way in strategy.ways(asked, degrees[axis])]
                found = [{**a, **b} for a in found for b in own]
        return found

    def _any_tape(self, degrees: Mapping[str, int]) -> Tape:
        """One of those of the model, for what is the same whatever the degrees."""
        if self.shared.tape is None:
            try:
                self.shared.tape = self.shared.tapes.of(self.basis, self.rules, degrees)
            except PlanError:  # it does not run on a part of its batch
                self.shared.tape = self.shared.tapes.of(self.basis, self.rules, dict.fromkeys(degrees, 1))
        return self.shared.tape

    # ---- exact
    def evaluate(self, point: Point | Mapping[str, int], stage: int | None = None) -> Candidate:
        """The candidate of a configuration; where nothing fits the memory, the placement that needs least.

        `point`: or degrees, with `stage` for what ranks along zero share; None takes that of the setting.

        Raises:
            PlanError: a strategy cannot have it so.
        """
        if not isinstance(point, Point):
            point = self.point(point, stage)
        self.evaluated += 1
        axes = self._searched(point)
        placed = self._exact(point, axes)
        candidate = self._costed(point, placed, axes)
        if candidate.excess_bytes and axes and point.recompute != BY_STAGE:
            hopeless = least_bytes(candidate, self.basis.sizes) > self.setting.limit
            factor = parameter_factor(self.setting.optimizer)
            own = placed.with_recompute(self.recompute(point))
            problem = own.problem
            tight = None if hopeless else self._within(problem, self._tight(candidate, own))
            if tight is not None:
                fitting = self._costed(point, self._new(placed.problem, tight), axes)
                if not fitting.excess_bytes:
                    return fitting
            # nothing fits: show the placement that comes closest
            least = self._within(problem, MemoryTerms(1e-6, factor))
            if least is not None:
                closest = self._costed(point, self._new(placed.problem, least), axes)
                return min(candidate, closest, key=lambda c: c.total_bytes)
        return candidate

    # ---- estimated
    def estimate(self, point: Point, beyond: float = math.inf) -> Candidate:
        """As `evaluate`, with placements that were found for another number of rows: no program is solved anew.

        `beyond`: seconds from which it may say less than it takes.

        Raises:
            PlanError: a strategy cannot have it so.
        """
        axes = self._searched(point)
        far = self._far(point, axes, beyond) if math.isfinite(beyond) else None
        if far is not None:
            return far
        tape = self._tape(point, rough=True)
        exact = self._placed.get(self._key(point, tape, axes))
        if exact is not None:
            return self._costed(point, exact, axes, True, beyond)
        family = self._family(point, tape, axes)
        model = self._models.get(family)
        if model is None:
            model = self._models[family] = self._model(family, point, tape, axes)
        own = model if model.problem.tape is tape else model.at(tape)
        return self._costed(point, own, axes, True, beyond)

    def _far(self, point: Point, axes: Axes, beyond: float) -> Candidate | None:
        """The estimate by tapes of more rows, where that is far beyond: a tape of one row need not be recorded then."""
        about = self.shared.tapes.about(self.basis, self.rules, dict(point.degrees), point.microbatches)
        model = None if about is None else self._models.get(self._family(point, about, axes))
        if about is None or model is None:
            return None
        found = self._costed(point, model.at(about), axes, True, beyond)
        return found if found.step_seconds >= FAR * beyond else None

    def _family(self, point: Point, tape: Tape, axes: Axes) -> tuple[object, ...]:
        """Of configurations that may have each other's placements."""
        return (
            self.setting.dtype,
            *self._joined(point, axes),
            self._meshed(point),
            tuple(self._present(point)),
            self.setting.sequence_parallel,
            len(tape.nodes),
            len(tape.values),
            None if tape.division is None or tape.origin is not None else id(tape),
        )

    def _model(self, family: tuple[object, ...], point: Point, tape: Tape, axes: Axes) -> Placed:
        known = self.shared.models.get(family)
        if known is not None:
            return self._new(*known)
        found = self._exact(point, axes, tape)
        self.shared.models[family] = found.problem, found.placement
        return found

    def recompute(self, point: Point) -> tuple[RecomputeRule, ...]:
        """The modules that a configuration runs twice."""
        wanted = point.recompute
        return () if wanted is None or wanted is BY_STAGE else self._named(wanted, dict(point.degrees))

    def _named(self, wanted: str, degrees: Mapping[str, int]) -> tuple[RecomputeRule, ...]:
        rules = self.shared.rules
        if wanted not in rules:
            rules[wanted] = recompute_rules(self.setting.model, wanted, self._any_tape(degrees).calls)
        return rules[wanted]

    def can_recompute(self, degrees: Mapping[str, int]) -> tuple[str, ...]:
        """The policies that the model can have with these degrees, the cheapest in time first."""
        if self.shared.blocks is None:
            self.shared.blocks = repeated_blocks(self.setting.model, self._any_tape(degrees).calls)
        if not self.shared.blocks:
            return ()
        return tuple(reversed(POLICIES))

    def can_ease(self, candidate: Candidate) -> bool:
        """Whether what a candidate runs again may be chosen stage by stage."""
        if self.setting.recompute is not None or candidate.point.recompute in (None, BY_STAGE):
            return False
        return any(d > 1 and self.setting.strategies[a].divides for a, d in candidate.point.degrees)

    # ---- parts
    def _searched(self, point: Point) -> Axes:
        """The axes whose placements are searched, outermost first: none, one or two."""
        strategies = self.setting.strategies
        return tuple(a for a, d in point.degrees if d > 1 and strategies[a].placement_search)

    def _joined(self, point: Point, axes: Axes) -> tuple[object, ...]:
        """Per searched axis its name, degree and link; of none, what joins one rank to itself."""
        degrees = dict(point.degrees)
        if not axes:
            return (("", 1, self.basis.link(degrees, None)),)
        return tuple((axis, degrees[axis], self.basis.link(degrees, axis)) for axis in axes)

    def _present(self, point: Point) -> list[str]:
        return [axis for axis in self.surveys if point.degree(axis) > 1 and self.surveys[axis].parameters]

    def _meshed(self, point: Point) -> bool:
        """Whether laying operations over a mesh costs something: not where ranks hold different modules and nothing else."""
        if not self.setting.cluster.dispatch_s:
            return False
        return any(d > 1 and not self.setting.strategies[a].divides for a, d in point.degrees)

    def _tape(self, point: Point, rough: bool = False) -> Tape:
        degrees = dict(point.degrees)
        return self.shared.tapes.of(self.basis, self.rules, degrees, point.microbatches, rough)

    def _key(self, point: Point, tape: Tape, axes: Axes) -> tuple[object, ...]:
        # variants of a search may differ in sequence_parallel
        sequence = self.setting.sequence_parallel
        return (id(tape), *self._joined(point, axes), self._meshed(point), sequence, *self._present(point))

    def _exact(self, point: Point, axes: Axes, tape: Tape | None = None) -> Placed:
        tape = self._tape(point) if tape is None else tape
        key = self._key(point, tape, axes)
        if key not in self._placed:
            problem = self._problem(point, tape, axes)
            solved, placements = (*key, self.setting.optimizer), self.shared.placements
            if solved not in placements:
                placements[solved] = self._place(problem)
            self._placed[key] = self._new(problem, placements[solved])
        return self._placed[key]

    def _new(self, problem: PlacementProblem, placement: Placement) -> Placed:
        return Placed(self.basis, self.rules, problem, placement)

    def _costed(
        self, point: Point, placed: Placed, axes: Axes, rough: bool = False, beyond: float = math.inf
    ) -> Candidate:
        if point.recompute == BY_STAGE:
            known, free = self._full.get((point.but(recompute=None), rough), (None, None))
            found = (
                cost(point, placed, axes, rough=rough)
                if free is None or known is not placed
                else replace(free, point=point)
            )
            return eased(found, placed, self._again(point, placed))
        found = cost(point, placed.with_recompute(self.recompute(point)), axes, rough=rough, beyond=beyond)
        if point.recompute is None and found.excess_bytes:
            self._full[point, rough] = placed, found
        return found

    def _again(self, point: Point, placed: Placed) -> Again:
        """What may run again of a placement, found once."""
        if id(placed) not in self._eased:
            degrees = dict(point.degrees)
            policies = {policy: self._named(policy, degrees) for policy in self.can_recompute(degrees)}
            tape = placed.problem.tape
            if self.shared.named is None:
                self.shared.named = tuple(recomputed_blocks(tape, next(iter(policies.values()), ())))
            self._eased[id(placed)] = placed, Again.of(placed, policies, self.shared.named)
        return self._eased[id(placed)][1]

    def _problem(self, point: Point, tape: Tape, axes: Axes) -> PlacementProblem:
        surveyed, meshed = self._present(point) if axes else [], self._meshed(point)
        degrees = dict(point.degrees)
        named = axes or (None,)
        links = [self.basis.link(degrees, axis) for axis in named]
        shape = [(axis, 1 if axis is None else degrees[axis]) for axis in named]
        costs = [
            AxisCosts(self.setting.cluster, link, degree, meshed, self.setting.cost_model)
            for link, (_, degree) in zip(links, shape, strict=True)
        ]
        stored = [self.setting.stored.get(axis, {}) for axis in axes]
        like: tuple[object, ...] = (id(tape), *shape, meshed, self.setting.sequence_parallel)
        linked, problems = (*links, *like), self.shared.problems
        if like not in problems:
            problems[like] = problems[linked] = self._made(tape, costs, stored)
        if linked not in problems:  # what is legal is so whatever joins the ranks
            problems[linked] = problems[like].across(JointCosts.of(costs) if len(axes) > 1 else costs[0])
        key = (*linked, *surveyed)
        if key not in problems:  # what a strategy places itself is not for the search to place
            held: dict[str, State] = {name: "I" for a in surveyed for name in self.surveys[a].parameters}
            problems[key] = problems[linked].pinning(_pins([{**held, **own} for own in stored]))
        return problems[key]

    def _made(
        self, tape: Tape, costs: Sequence[AxisCosts], stored: Sequence[Mapping[str, State]]
    ) -> PlacementProblem:
        """The problem on one axis, or on two; `stored`: how the user stores parameters on each."""
        repeats, pins = self.shared.tapes.quotient(tape), _pins(stored)
        sequence = self.setting.sequence_parallel
        if len(costs) == 1:
            legality = Legality(tape, repeats, self.rules, costs[0], tape.rows, pins, sequence)
            return PlacementProblem(legality, pins)
        # if one of the two axes must split the sequence, only the joint legality can say which
        alone = None if sequence else sequence
        each = [
            Legality(tape, repeats, self.rules, axis_costs, tape.rows, axis_stored, alone)
            for axis_costs, axis_stored in zip(costs, stored, strict=True)
        ]
        return JointProblem(JointLegality(each, sequence), pins)

    def _place(self, problem: PlacementProblem) -> Placement:
        """The fastest placement that makes use of the axis: weights are sharded where they can be used sharded.

        On a tiny model any communication costs more than replicated compute, and the fastest placement would be to
        shard nothing; but a degree is there to divide the model.
        """
        terms = MemoryTerms(PRICE, parameter_factor(self.setting.optimizer))
        if problem.costs.degree == 1:
            return problem.replicated()
        late = None
        # all of them, else those that nothing stands in the way of, else what is fastest
        for divided in dict.fromkeys((problem.weights(), problem.weights(alone=True), frozenset[int]())):
            try:
                placement = problem.solve(terms, divided=divided, time_limit=self._patience(problem))
            except Unsolved as unsolved:
                late = unsolved
                continue
            if placement is not None:
                return placement
        if late is not None:
            raise late
        raise UsageError(
            "the placement search found no legal placement; check the pinned parameter placements"
            + sequence_hint(self.setting)
        )

    def _within(self, problem: PlacementProblem, terms: MemoryTerms) -> Placement | None:
        """The placement with so much memory; None where there is none, or none was found in time."""
        try:
            return problem.solve(terms, time_limit=self._patience(problem))
        except Unsolved:
            return None

    def _patience(self, problem: PlacementProblem) -> float:
        """Seconds for an answer: what a time budget leaves, but so much that what is looked at first gets one."""
        return min(problem.patience, max(LEAST_PATIENCE, self.end - time.monotonic()))

    def _tight(self, candidate: Candidate, placed: Placed) -> MemoryTerms:
        """The room there is, in bytes of what the problem sees: one microbatch of the whole model."""
        memory, factor = candidate.memory, parameter_factor(self.setting.optimizer)
        stored = placed.memory["parameters"] or 1
        training = sum(memory[part] for part in ("parameters", "gradients", "optimizer")) / stored
        kept = memory["activations"] / (placed.placement.saved_bytes or 1.0) or 1.0
        fixed = sum(memory.values()) - training * stored - memory["activations"]
        outside = sum(
            p.numel() * p.element_size()
            for name, p in self.setting.model.named_parameters()
            if name not in candidate.problem.read_parameters
        )
        room = candidate.limit - fixed - outside * training
        return MemoryTerms(PRICE, min(factor, training) / kept, max(1.0, room / kept))


def _pins(stored: Sequence[Mapping[str, State]]) -> dict[str, Any]:
    """Parameter name -> state, or where two axes are searched the state on each, None where it is free."""
    if len(stored) < 2:
        return dict(stored[0]) if stored else {}
    names = dict.fromkeys(name for some in stored for name in some)
    return {name: tuple(some.get(name) for some in stored) for name in names}
