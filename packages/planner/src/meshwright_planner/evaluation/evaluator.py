"""`Search` evaluates configurations: it finds the best placements on the searched axes and predicts the cost."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from meshwright_dtensor.errors import PlanError, UsageError
from meshwright_dtensor.model.blocks import repeated_blocks
from meshwright_dtensor.plan import RecomputeRule
from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.sharding.boxes import shardable
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.strategy import Link, PipelineQuery, StepContext
from meshwright_dtensor.utils.names import listing
from meshwright_planner.cost.prices import AxisCosts, JointCosts
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.configuration import BY_STAGE, Point
from meshwright_planner.evaluation.context import Basis, Setting, Surveys
from meshwright_planner.evaluation.degrees import combinations
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.evaluation.stage_recompute import RecomputeVariants
from meshwright_planner.evaluation.step_cost import cost, with_stage_recompute
from meshwright_planner.evaluation.tapes import SearchCache, Tapes
from meshwright_planner.placement.ilp import MemoryTerms, Unsolved
from meshwright_planner.placement.legal_rows import Legality
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.placement.solve import solve
from meshwright_planner.placement.two_axes import JointLegality, JointProblem
from meshwright_planner.recompute.region import recomputed_blocks
from meshwright_planner.recompute.rules import POLICIES, recompute_rules
from meshwright_planner.trace.tape import Tape

PRICE = 1e-15
"""Price of a byte in seconds where memory is not scarce. It only breaks ties."""

LEAST_PATIENCE = 60.0
"""Seconds that a placement may take after the time budget is spent."""

FAR = 1.5
"""An estimate scaled from tapes of more rows is enough where it exceeds the bound on the step by this factor."""

Axes: TypeAlias = tuple[str, ...]
"""Names of searched axes, outermost first."""

Stored: TypeAlias = Mapping[str, State]
"""Name of a parameter -> its state on one axis."""


class Search:
    """Evaluates configurations. Recorded tapes and solved placements are shared by all configurations and variants."""

    def __init__(self, setting: Setting, rules: RuleBook, shared: SearchCache | None = None) -> None:
        self.setting, self.rules = setting, rules
        self.shared = SearchCache(Surveys(setting.model), Tapes(rules)) if shared is None else shared
        self.basis = Basis(setting, self.shared.surveys)
        self.surveys = self.basis.surveys
        # variants of a search share its time budget
        budget = math.inf if setting.time_budget is None else setting.time_budget
        self.end = self.shared.memo.once("end", lambda: time.monotonic() + budget)
        self._placed: dict[tuple[object, ...], Placed] = {}
        self._models: dict[tuple[object, ...], Placed] = {}
        self._variants: dict[int, tuple[Placed, RecomputeVariants]] = {}
        # candidates without recompute that do not fit, by configuration and whether they are estimates
        self._full: dict[tuple[Point, bool], tuple[Placed, Candidate]] = {}

    def variant(self, **changes: object) -> Search:
        """A search with a changed setting for the same model and cluster. It shares tapes and placements."""
        return Search(replace(self.setting, **changes), self.rules, self.shared)  # type: ignore[arg-type]

    def combinations(self) -> list[dict[str, int]]:
        """Every legal combination of degrees."""
        return combinations(self.basis)

    def point(self, degrees: Mapping[str, int], stage: int | None = None) -> Point:
        """The configuration with these degrees; everything else comes from the setting or the first way."""
        full = {axis: degrees.get(axis, 1) for axis in self.setting.strategies}
        shared = self.setting.stage if stage is None else stage
        ways = self.ways(full)
        return Point.of(full, shared, ways[0] if ways else {}, self.setting.recompute)

    def ways(self, degrees: Mapping[str, int], thorough: bool = False) -> list[dict[str, object]]:
        """The options that strategies offer with these degrees, all axes combined; `thorough`: all that are legal."""
        combined: list[dict[str, object]] = [{}]
        batch = self.setting.batch
        for axis, strategy in self.setting.strategies.items():
            if degrees[axis] > 1:
                pipeline = PipelineQuery()
                if strategy.divides:
                    tape = self._any_tape(degrees)
                    pipeline = PipelineQuery(
                        shared_cores=self.setting.cluster.shared_core_factors(degrees[axis]),
                        scalar_flows=tape.numbers,
                        calls=tape.calls,
                        example=(batch.args, batch.kwargs),
                    )
                request = replace(
                    self.basis.request(axis),
                    batch_size=max(1, batch.size // self.basis.batch_factor(degrees)),
                    step=StepContext(degrees=dict(degrees)),
                    exhaustive=thorough,
                    pipeline=pipeline,
                )
                offered = [dict(way) for way in strategy.ways(request, degrees[axis])]
                combined = [{**outer, **way} for outer in combined for way in offered]
        return combined

    def _any_tape(self, degrees: Mapping[str, int]) -> Tape:
        """A tape of the model, for facts that do not depend on the degrees."""

        def recorded() -> Tape:
            try:
                return self.shared.tapes.of(self.basis, degrees)
            except PlanError:
                # the model does not run on a part of its batch
                return self.shared.tapes.of(self.basis, dict.fromkeys(degrees, 1))

        return self.shared.memo.once("tape", recorded)

    # ---- exact
    def evaluate(self, point: Point | Mapping[str, int], stage: int | None = None) -> Candidate:
        """The candidate of a configuration; where nothing fits the memory, with the placement that needs least.

        `point`: or degrees, with `stage` as ZeRO stage (None: of the setting). Raises PlanError: a strategy does not support it.
        """
        if not isinstance(point, Point):
            point = self.point(point, stage)
        axes = self._searched(point)
        placed = self._exact(point, axes)
        candidate = self._costed(point, placed, axes)
        if candidate.excess_bytes and axes and point.recompute != BY_STAGE:
            hopeless = candidate.least_bytes(self.basis.sizes) > self.setting.limit
            factor = self.setting.training_bytes
            recomputed = placed.with_recompute(self.recompute(point))
            problem = recomputed.problem
            tight = None if hopeless else self._within(problem, self._tight(candidate, recomputed))
            if tight is not None:
                fitting = self._costed(point, Placed(self.basis, placed.problem, tight), axes)
                if not fitting.excess_bytes:
                    return fitting
            # nothing fits: return the placement that needs least
            least = self._within(problem, MemoryTerms(1e-6, factor))
            if least is not None:
                closest = self._costed(point, Placed(self.basis, placed.problem, least), axes)
                return min(candidate, closest, key=lambda c: c.total_bytes)
        return candidate

    # ---- estimated
    def estimate(self, point: Point, beyond: float = math.inf) -> Candidate:
        """As `evaluate`, with placements that were found for another number of rows, so that no program is solved.

        `beyond`: seconds of a step from which the estimate may be too low. Raises PlanError: as of `evaluate`.
        """
        axes = self._searched(point)
        larger = None
        if math.isfinite(beyond):
            # tapes of more rows may show that it is far beyond, so that no tape of one row is recorded
            larger = self.shared.tapes.for_more_rows(self.basis, dict(point.degrees), point.microbatches)
        model = None if larger is None else self._models.get(self._family(point, larger, axes))
        if larger is not None and model is not None:
            far = self._costed(point, model.at(larger), axes, True, beyond)
            if far.step_seconds >= FAR * beyond:
                return far
        tape = self._tape(point, rough=True)
        exact = self._placed.get(self._key(point, tape, axes))
        if exact is not None:
            return self._costed(point, exact, axes, True, beyond)
        family = self._family(point, tape, axes)
        model = self._models.get(family)
        if model is None:
            solved = self.shared.models.get(family)
            model = self._exact(point, axes, tape) if solved is None else Placed(self.basis, *solved)
            self._models[family] = model
            self.shared.models[family] = model.problem, model.placement
        placed = model if model.problem.tape is tape else model.at(tape)
        return self._costed(point, placed, axes, True, beyond)

    def _family(self, point: Point, tape: Tape, axes: Axes) -> tuple[object, ...]:
        """The key of configurations that can use the same placements."""
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

    def recompute(self, point: Point) -> tuple[RecomputeRule, ...]:
        """The recompute rules of a configuration."""
        wanted = point.recompute
        return self._rules_of(wanted, dict(point.degrees)) if isinstance(wanted, str) else ()

    def _rules_of(self, wanted: str, degrees: Mapping[str, int]) -> tuple[RecomputeRule, ...]:
        model, calls = self.setting.model, self._any_tape(degrees).calls
        return self.shared.memo.once(("rules", wanted), lambda: recompute_rules(model, wanted, calls))

    def can_recompute(self, degrees: Mapping[str, int]) -> tuple[str, ...]:
        """The recompute policies that the model allows, the cheapest in time first."""
        model, calls = self.setting.model, self._any_tape(degrees).calls
        patterns = self.shared.memo.once("patterns", lambda: repeated_blocks(model, calls))
        return tuple(reversed(POLICIES)) if patterns else ()

    def has_stage_choice(self, candidate: Candidate) -> bool:
        """Whether each stage of a candidate may choose the blocks that it recomputes."""
        if self.setting.recompute is not None or candidate.point.recompute in (None, BY_STAGE):
            return False
        return any(d > 1 and self.setting.strategies[a].divides for a, d in candidate.point.degrees)

    # ---- parts
    def _searched(self, point: Point) -> Axes:
        """The axes whose placements are searched, outermost first: none, one or two."""
        return tuple(a for a, d in point.degrees if d > 1 and self.setting.strategies[a].placement_search)

    def _joined(self, point: Point, axes: Axes) -> tuple[tuple[str, int, Link], ...]:
        """Per searched axis its name, degree and link; without any, one entry for a single rank."""
        degrees = {"": 1, **dict(point.degrees)}
        return tuple((axis, degrees[axis], self.basis.link(degrees, axis)) for axis in axes or ("",))

    def _present(self, point: Point) -> list[str]:
        """Axes whose strategies place parameters themselves."""
        return [axis for axis in self.surveys if point.degree(axis) > 1 and self.surveys[axis].parameters]

    def _meshed(self, point: Point) -> bool:
        """Whether operations pay for dispatch on a mesh. A pipeline without other axes has none."""
        meshed = any(d > 1 and not self.setting.strategies[a].divides for a, d in point.degrees)
        return meshed and bool(self.setting.cluster.dispatch_s)

    def _tape(self, point: Point, rough: bool = False) -> Tape:
        degrees = dict(point.degrees)
        return self.shared.tapes.of(self.basis, degrees, point.microbatches, rough)

    def _key(self, point: Point, tape: Tape, axes: Axes) -> tuple[object, ...]:
        # variants of a search may differ in sequence_parallel
        sequence = self.setting.sequence_parallel
        return (id(tape), *self._joined(point, axes), self._meshed(point), sequence, *self._present(point))

    def _exact(self, point: Point, axes: Axes, tape: Tape | None = None) -> Placed:
        tape = self._tape(point) if tape is None else tape
        key = self._key(point, tape, axes)
        if key not in self._placed:
            problem = self._problem(point, tape, axes)
            solved = ("placement", *key, self.setting.optimizer)
            placement = self.shared.memo.once(solved, lambda: self._place(problem))
            self._placed[key] = Placed(self.basis, problem, placement)
        return self._placed[key]

    def _costed(
        self, point: Point, placed: Placed, axes: Axes, rough: bool = False, beyond: float = math.inf
    ) -> Candidate:
        if point.recompute == BY_STAGE:
            costed, full = self._full.get((point.but(recompute=None), rough), (None, None))
            if full is None or costed is not placed:
                full = cost(point, placed, axes, rough=rough)
            variants = self._recompute_variants(point, placed)
            return with_stage_recompute(replace(full, point=point), placed, variants)
        recomputed = placed.with_recompute(self.recompute(point))
        candidate = cost(point, recomputed, axes, rough=rough, beyond=beyond)
        if point.recompute is None and candidate.excess_bytes:
            self._full[point, rough] = placed, candidate
        return candidate

    def _recompute_variants(self, point: Point, placed: Placed) -> RecomputeVariants:
        """The variants of a placement for stage-wise recompute, computed once."""
        if id(placed) not in self._variants:
            degrees = dict(point.degrees)
            policies = {policy: self._rules_of(policy, degrees) for policy in self.can_recompute(degrees)}
            tape = placed.problem.tape
            first = next(iter(policies.values()), ())
            blocks = self.shared.memo.once("blocks", lambda: tuple(recomputed_blocks(tape, first)))
            self._variants[id(placed)] = placed, RecomputeVariants.of(placed, policies, blocks)
        return self._variants[id(placed)][1]

    def _problem(self, point: Point, tape: Tape, axes: Axes) -> PlacementProblem:
        present, meshed = self._present(point) if axes else [], self._meshed(point)
        setting, problems, joined = self.setting, self.shared.problems, self._joined(point, axes)
        cluster, model = setting.cluster, setting.cost_model
        costs = [AxisCosts(cluster, link, degree, meshed, model) for _, degree, link in joined]
        stored = [setting.stored.get(axis, {}) for axis in axes]
        shape = [(axis, degree) for axis, degree, _ in joined]
        unlinked: tuple[object, ...] = (id(tape), *shape, meshed, setting.sequence_parallel)
        linked = (*(link for _, _, link in joined), *unlinked)
        if unlinked not in problems:
            problems[unlinked] = problems[linked] = self._made(tape, costs, stored)
        if linked not in problems:
            # the same placements are legal over any links
            problems[linked] = problems[unlinked].across(JointCosts.of(costs) if len(axes) > 1 else costs[0])
        key = (*linked, *present)
        if key not in problems:
            # the search does not place parameters that a strategy places
            whole: dict[str, State] = {name: "I" for a in present for name in self.surveys[a].parameters}
            problems[key] = problems[linked].pinning(_pins([{**whole, **pins} for pins in stored]))
        return problems[key]

    def _made(self, tape: Tape, costs: Sequence[AxisCosts], stored: Sequence[Stored]) -> PlacementProblem:
        """The placement problem on one axis, or on two; `stored`: pins of parameters on each."""
        repeats, pins = self.shared.tapes.quotient(tape), _pins(stored)
        sequence = self.setting.sequence_parallel
        if len(costs) == 1:
            legality = Legality(tape, repeats, self.rules, costs[0], pins, sequence, bool(sequence))
            return PlacementProblem(legality, pins)
        # if one of the two axes must split the sequence, only the joint legality can say which
        alone = None if sequence else sequence
        of_axis = zip(costs, stored, strict=True)
        each = [
            Legality(tape, repeats, self.rules, prices, pinned, alone, bool(sequence))
            for prices, pinned in of_axis
        ]
        return JointProblem(JointLegality(each, sequence), pins)

    def _place(self, problem: PlacementProblem) -> Placement:
        """The fastest placement that uses the axis: weights are sharded wherever operations can use them sharded.

        On a tiny model any communication costs more than replicated compute, so that the fastest placement would shard
        nothing. But a degree of a searched axis is there to divide the model.
        """
        terms = MemoryTerms(PRICE, self.setting.training_bytes)
        if problem.costs.degree == 1:
            return problem.replicated()
        unsolved = None
        # shard all weights, else those that no other operation of their call keeps whole, else the fastest
        for divided in dict.fromkeys((problem.weights(), problem.weights(alone=True), frozenset[int]())):
            try:
                placement = solve(problem, terms, divided, self._patience(problem))
            except Unsolved as error:
                unsolved = error
                continue
            if placement is not None:
                return placement
        if unsolved is not None:
            raise unsolved
        rule = "the placement search found no legal placement; check the pinned parameter placements"
        raise UsageError(f"{rule}; {_unsplit(problem)}" if self.setting.sequence_parallel else rule)

    def _within(self, problem: PlacementProblem, terms: MemoryTerms) -> Placement | None:
        """The placement with these memory terms; None where there is none, or none was found in time."""
        try:
            return solve(problem, terms, time_limit=self._patience(problem))
        except Unsolved:
            return None

    def _patience(self, problem: PlacementProblem) -> float:
        """Seconds that a placement may take: what the time budget leaves, but enough for the first configurations."""
        return min(problem.patience, max(LEAST_PATIENCE, self.end - time.monotonic()))

    def _tight(self, candidate: Candidate, placed: Placed) -> MemoryTerms:
        """The memory limit in bytes as the placement problem counts them: one microbatch of the whole model."""
        memory, factor = candidate.memory, self.setting.training_bytes
        stored = placed.memory["parameters"] or 1
        training = sum(memory[part] for part in ("parameters", "gradients", "optimizer")) / stored
        kept = memory["activations"] / (placed.placement.saved_bytes or 1.0) or 1.0
        fixed = sum(memory.values()) - training * stored - memory["activations"]
        # parameters that the results do not depend on
        tape = candidate.problem.tape
        read = {ref.i for node in tape.nodes for ref in node.ins}
        sizes = self.basis.sizes.parameters
        outside = sum(nbytes for name, nbytes, _ in sizes if tape.parameters.get(name) not in read)
        room = candidate.limit - fixed - outside * training
        return MemoryTerms(PRICE, min(factor, training) / kept, max(1.0, room / kept))


def _pins(stored: Sequence[Stored]) -> dict[str, Any]:
    """Parameter name -> state; with two searched axes the state on each, None where it is free."""
    if len(stored) < 2:
        return dict(stored[0]) if stored else {}
    names = dict.fromkeys(name for some in stored for name in some)
    return {name: tuple(some.get(name) for some in stored) for name in names}


def _unsplit(problem: PlacementProblem) -> str:
    """Why sequence_parallel=True has no placement."""
    lengths, degree = problem.legality.sequence_lengths(), max(problem.costs.degrees)
    name = "sequence_parallel=True"
    if not lengths:
        return f"{name} needs a sequence that blocks pass on, and these pass none that an axis can shard: leave it out"
    if all(shardable(length, degree) for length in lengths):
        return f"{name} needs placements that split the sequence between blocks: leave it out to allow others"
    return (
        f"{name} needs a part of the sequence ({listing(map(str, lengths))} tokens between blocks) for each of {degree} ranks "
        "of equal length but for the last: change the degree or the number of tokens, or leave it out"
    )
