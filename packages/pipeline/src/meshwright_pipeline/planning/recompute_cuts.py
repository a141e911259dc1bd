"""Chooses the recomputed units of each stage together with the stage cuts, if memory is short."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from itertools import accumulate, compress

from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.strategy import ModuleWork, SearchRequest
from meshwright_pipeline.planning.recompute import Choices, Moment, RunChoice, UnitOption, cheapest, moments
from meshwright_pipeline.planning.stage_costs import StageDivision, divide, parameters_of
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import ModelCosts, UnitWork, group_by_unit, shared_bytes

RANGES = 256
"""Approximate number of candidate stages to evaluate when cuts are moved."""


@dataclass(frozen=True)
class RecomputeOptions:
    """The options of each run of a model.

    Args:
        variants: the recorded work with recomputation, for each policy.
        runs: the options of each run: first without recomputation, then by policy.
        policies: their names, "" for none.
        kinds: the kind of each run in `choices`; repeated blocks are of one kind.
        choices: the choices of sequences of runs.
    """

    variants: tuple[tuple[ModuleWork, ...], ...]
    runs: list[list[UnitWork]]
    policies: list[list[str]]
    kinds: list[int]
    choices: Choices

    @staticmethod
    def of(
        model: ModelCosts, survey: ModelSurvey, variants: Mapping[str, tuple[ModuleWork, ...]]
    ) -> RecomputeOptions:
        """The options of a model. Units that are called several times do not recompute."""
        others = {policy: group_by_unit(work, survey, model.shared)[0] for policy, work in variants.items()}
        times = Counter(run.unit for run in model.runs)
        runs: list[list[UnitWork]] = []
        policies: list[list[str]] = []
        for place, run in enumerate(model.runs):
            runs.append([run])
            policies.append([""])
            if times[run.unit] == 1:
                for policy, other in others.items():
                    if other[place].kept < run.kept:
                        runs[-1].append(other[place])
                        policies[-1].append(policy)
        kinds: dict[tuple[UnitOption, ...], int] = {}
        numbers = []
        for place, options in enumerate(runs):
            tail = [model.tail] if place == len(runs) - 1 else []
            wholes = [reduce(UnitWork.then, [run, *tail], model.between[place]) for run in options]
            key = tuple(UnitOption(w.seconds, math.ceil(w.saved_bytes), math.ceil(w.over)) for w in wholes)
            numbers.append(kinds.setdefault(key, len(kinds)))
        return RecomputeOptions(tuple(variants.values()), runs, policies, numbers, Choices(list(kinds)))


def recompute_to_fit(
    request: SearchRequest,
    model: ModelCosts,
    survey: ModelSurvey,
    schedule: Schedule,
    shape: Shape,
    even: StageDivision,
    limit: float,
    between: tuple[float, float] | None = None,
) -> tuple[StageDivision, Mapping[str, str]] | None:
    """Stages that use at most `limit` bytes on each rank, with the slowest stage as fast as possible, and the recompute
    policy of each unit that recomputes; None if none fit.

    Tensors that several units share count once on a stage, as if all units kept them.

    Args:
        even: the stages without a memory limit.
        limit: bytes for parameters, gradients, optimizer states and everything that a step holds.
        between: on the rank of the last stage, bytes that the tail takes between forwards and backwards, and bytes that remain
            during the backwards; None without a tail.
    """
    variants = request.pipeline.recompute_variants
    options = model.memo.once("recompute options", lambda: RecomputeOptions.of(model, survey, variants))
    if any(a is not b for a, b in zip(options.variants, variants.values(), strict=True)):
        options = RecomputeOptions.of(model, survey, variants)
    fit = _MemoryFit(request, model, survey, options, _moments(schedule, shape, between), limit)
    ends = [0, *even.cuts, len(model.runs)]
    by_rank = [schedule.own(rank, shape) for rank in range(shape.ranks)]
    best = fit.choose([[(ends[stage], ends[stage + 1]) for stage in stages] for stages in by_rank])
    if shape.each == 1 and all(stages == [rank] for rank, stages in enumerate(by_rank)):
        # by how many blocks each cut may be moved, in both directions
        reach = max(0, (math.isqrt(RANGES // shape.ranks) - 1) // 2)
        other = fit.cut(ends, reach)
        if other is not None and (best is None or other[0] < (1 - 1e-6) * fit.slowest(best)):
            best = fit.choose([[pair] for pair in zip(other[1], other[1][1:], strict=False)])
    if best is None:
        return None
    chosen = [option for _, choice in sorted(best.items()) for option in choice.options]
    runs = [of_run[option] for of_run, option in zip(options.runs, chosen, strict=True)]
    names = [of_run[option] for of_run, option in zip(options.policies, chosen, strict=True)]
    policies = {run.unit: name for run, name in zip(runs, names, strict=True) if name}
    return divide(replace(model, runs=runs), survey, sorted(a for a, _ in best if a)), policies


def _moments(
    schedule: Schedule, shape: Shape, between: tuple[float, float] | None
) -> list[list[tuple[Moment, float]]]:
    """For each rank, the moments at which its memory may peak, and bytes that do not depend on the choice."""
    result = [[(moment, 0.0) for moment in of_rank] for of_rank in moments(schedule, shape)]
    if between is not None:
        owner, (tail_bytes, gradient_bytes) = schedule.owner(shape.stages - 1, shape), between
        last = [(moment, gradient_bytes) for moment, _ in result[owner]]
        stages = len(last[0][0].kept)
        result[owner] = [*last, (Moment((shape.microbatches,) * stages, -1, (False,) * stages), tail_bytes)]
    return result


Stages = dict[tuple[int, int], RunChoice]
"""(first run of a stage, first run after it) -> the choice for its runs."""


@dataclass(frozen=True)
class _MemoryFit:
    """Finds the fastest choices that fit in the memory of each rank."""

    request: SearchRequest
    model: ModelCosts
    survey: ModelSurvey
    options: RecomputeOptions
    moments: Sequence[Sequence[tuple[Moment, float]]]
    limit: float

    def choose(self, ranks: Sequence[Sequence[tuple[int, int]]]) -> Stages | None:
        """The fastest choices for ranks with these stages; None if a rank has too little memory."""
        chosen: Stages = {}
        for rank, stages in enumerate(ranks):
            choices = self._rank(rank, stages)
            if choices is None:
                return None
            chosen.update(zip(stages, choices, strict=True))
        return chosen

    def slowest(self, stages: Stages) -> float:
        """Seconds of the slowest stage."""
        return max(choice.seconds + self._early[a] for (a, _), choice in stages.items())

    def cut(self, ends: Sequence[int], reach: int) -> tuple[float, list[int]] | None:
        """The best cut near `ends` with one stage per rank: seconds of the slowest stage, and its ends; None if none fits."""
        places = [*accumulate(map(len, self.model.blocks), initial=0)]
        middles = [places.index(end) for end in ends]
        # end of the stages so far -> (seconds of the slowest stage, seconds of all, ends)
        best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
        for stage, middle in enumerate(middles[1:]):
            near = range(max(1, middle - reach), min(len(places) - 1, middle + reach + 1))
            window = [middle] if stage == len(middles) - 2 else near
            extended: dict[int, tuple[float, float, list[int]]] = {}
            for end in window:
                for start, (slowest, seconds, cuts) in best.items():
                    if start < end:
                        a, b = places[start], places[end]
                        choices = self._rank(stage, [(a, b)])
                        if choices is not None:
                            stage_seconds = choices[0].seconds + self._early[a]
                            value = (max(slowest, stage_seconds), seconds + stage_seconds, [*cuts, b])
                            extended[end] = min(extended.get(end, value), value)
            best = extended
        if not best:
            return None
        slowest, _, cuts = min(best.values())
        return slowest, cuts

    def _rank(self, rank: int, stages: Sequence[tuple[int, int]]) -> tuple[RunChoice, ...] | None:
        """The fastest choices for the stages of a rank; None if it has too little memory."""
        request, crossing = self.request, self.model.crossing
        held = [self._held(*stage) for stage in stages]
        share = self.survey.share(held[0] if len(held) == 1 else held[0].union(*held[1:]))
        lasting = share * request.sizes.state_bytes
        if lasting > self.limit:
            return None
        gradients = [self.survey.share(names) * request.sizes.gradient_bytes for names in held]
        passing = max(crossing[a] + crossing[b] + max(crossing[a], crossing[b]) for a, b in stages)
        always = [self._shared(a, b) + crossing[b] for a, b in stages]
        peaks = self.moments[rank]

        def memory(stage: int, choice: RunChoice) -> list[float]:
            kept = choice.kept + always[stage]
            return [m.kept[stage] * kept + (choice.over if m.running == stage else 0) for m, _ in peaks]

        left = self.limit - lasting + share * request.sizes.gradient_bytes - passing
        free = [left - constant - sum(compress(gradients, m.has_gradients)) for m, constant in peaks]
        choices = [self.options.choices.of(self.options.kinds[a:b]) for a, b in stages]
        return cheapest(choices, memory, free)

    def _held(self, a: int, b: int) -> frozenset[str]:
        units = [run.unit for run in self.model.runs[a:b]]
        shared = self.model.shared
        return self.model.memo.once(("held", a, b), lambda: parameters_of(units, self.survey, shared))

    def _shared(self, a: int, b: int) -> float:
        """Bytes of the tensors that runs of a stage share, in any option."""

        def shared() -> float:
            work = [w for run in range(a, b) for w in (self.model.between[run], *self.options.runs[run])]
            work += [self.model.tail] if b == len(self.model.runs) else []
            return shared_bytes(*(part.shared for part in work))

        return self.model.memo.once(("shared", a, b), shared)

    @cached_property
    def _early(self) -> list[float]:
        """For each run, seconds of the code between the runs before it, which every later stage runs too."""
        return [*accumulate((between.forward for between in self.model.between), initial=0.0)]
