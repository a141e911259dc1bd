"""Where memory binds: which units of each stage run again, and where that is best cut."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from meshwright_dtensor.schedule.schedule import Schedule, Shape
from meshwright_dtensor.strategy import ModuleWork, SearchRequest
from meshwright_pipeline.planning.recompute import Choices, Moment, RunChoice, UnitOption, cheapest, moments
from meshwright_pipeline.planning.stage_costs import StageDivision, divide, parameters_of
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import ModelCosts, Shared, UnitWork, group_by_unit, shared_bytes

RANGES = 256
"""Stages (from one run to another) that are costed to find better cuts, about."""


@dataclass(frozen=True)
class StageRecompute:
    """Stages of which some run units again; `policies`: unit -> by which policy."""

    parts: StageDivision
    policies: Mapping[str, str]


@dataclass(frozen=True)
class RecomputeOptions:
    """How each run of a model may be done.

    Args:
        again: what they were read from.
        runs: per run, with what lies before it: first nothing again, then by policies.
        policies: their names, "" for nothing again.
        kinds: the kind of each run in `choices`; copies of a block are of one kind.
        choices: what rows of them can be.
    """

    again: tuple[tuple[ModuleWork, ...], ...]
    runs: list[list[UnitWork]]
    policies: list[list[str]]
    kinds: list[int]
    choices: Choices

    @staticmethod
    def of(
        found: ModelCosts, known: ModelSurvey, again: Mapping[str, tuple[ModuleWork, ...]]
    ) -> RecomputeOptions:
        """Those of a model that was read; what is called several times is left as it is."""
        others = {policy: group_by_unit(work, known, found.shared)[0] for policy, work in again.items()}
        times = Counter(run.unit for run in found.runs)
        runs: list[list[UnitWork]] = []
        policies: list[list[str]] = []
        for place, run in enumerate(found.runs):
            runs.append([run])
            policies.append([""])
            if times[run.unit] == 1:
                for policy, other in others.items():
                    if other[place].kept < run.kept:
                        runs[-1].append(other[place])
                        policies[-1].append(policy)
        kinds: dict[tuple[UnitOption, ...], int] = {}
        numbers = []
        for place, every in enumerate(runs):
            tail = found.tail if place == len(runs) - 1 else None
            key = tuple(_way(found.between[place], run, tail) for run in every)
            numbers.append(kinds.setdefault(key, len(kinds)))
        return RecomputeOptions(tuple(again.values()), runs, policies, numbers, Choices(list(kinds)))


def _way(glue: UnitWork, run: UnitWork, tail: UnitWork | None) -> UnitOption:
    whole = glue.then(run)
    if tail is not None:
        whole = whole.then(tail)
    return UnitOption(whole.seconds, math.ceil(whole.saved_bytes), math.ceil(whole.over))


def recompute_to_fit(
    request: SearchRequest,
    found: ModelCosts,
    known: ModelSurvey,
    schedule: Schedule,
    shape: Shape,
    even: StageDivision,
    room: float,
    between: tuple[float, float] | None = None,
) -> StageRecompute | None:
    """Stages that leave each rank no more than `room` bytes, the slowest of them as fast as can be; None where none do.

    What tensors several units keep counts once on a stage, as if all of them kept them however they run.

    Args:
        request: with the work of modules that run again.
        found, known: the model.
        schedule, shape: how the stages run.
        even: the stages if there were room for all.
        room: for parameters, gradients, optimizer states and all that a step holds beside them.
        between: bytes that the rank of the last stage takes between all forwards and all backwards, and that are there beside
            backwards from then on; None where nothing runs then.
    """
    again = request.pipeline.recompute_variants
    ways: RecomputeOptions = found.once("ways", lambda: RecomputeOptions.of(found, known, again))
    if any(a is not b for a, b in zip(ways.again, again.values(), strict=True)):
        ways = RecomputeOptions.of(found, known, again)
    rooms = _Rooms(request, found, known, ways, _moments(schedule, shape, between), room)
    ends = [0, *even.cuts, len(found.runs)]
    own = [schedule.own(rank, shape) for rank in range(shape.ranks)]
    best = rooms.filled([[(ends[stage], ends[stage + 1]) for stage in stages] for stages in own])
    if shape.each == 1 and all(stages == [rank] for rank, stages in enumerate(own)):
        other = rooms.cut(ends, _reach(shape.ranks))
        if other is not None and (best is None or other[0] < (1 - 1e-6) * rooms.slowest(best)):
            best = rooms.filled([[pair] for pair in zip(other[1], other[1][1:], strict=False)])
    return None if best is None else _relieved(found, known, ways, best)


def _moments(
    schedule: Schedule, shape: Shape, between: tuple[float, float] | None
) -> list[list[tuple[Moment, float]]]:
    """Per rank, when it may be fullest, and bytes that it takes then whatever is chosen."""
    found = [[(moment, 0.0) for moment in own] for own in moments(schedule, shape)]
    if between is not None:
        owner, (whole, beside) = schedule.owner(shape.stages - 1, shape), between
        last = [(moment, beside) for moment, _ in found[owner]]
        stages = len(last[0][0].kept)
        found[owner] = [*last, (Moment((shape.microbatches,) * stages, -1, (False,) * stages), whole)]
    return found


def _reach(stages: int) -> int:
    """By how many blocks each cut is moved, to and fro."""
    return max(0, (math.isqrt(RANGES // stages) - 1) // 2)


Stages = dict[tuple[int, int], RunChoice]
"""First run of a stage, and the one behind its last -> how its runs are done."""


@dataclass(frozen=True)
class _Rooms:
    """What fits into the room of each rank."""

    request: SearchRequest
    found: ModelCosts
    known: ModelSurvey
    ways: RecomputeOptions
    moments: Sequence[Sequence[tuple[Moment, float]]]
    room: float

    def filled(self, ranks: Sequence[Sequence[tuple[int, int]]]) -> Stages | None:
        """The fastest choices for ranks with these stages; None where one has no room."""
        found: Stages = {}
        for rank, stages in enumerate(ranks):
            choices = self._rank(rank, stages)
            if choices is None:
                return None
            found.update(zip(stages, choices, strict=True))
        return found

    def slowest(self, stages: Stages) -> float:
        """Seconds of the slowest stage."""
        return max(choice.seconds + self._early[a] for (a, _), choice in stages.items())

    def cut(self, ends: Sequence[int], reach: int) -> tuple[float, list[int]] | None:
        """Seconds of the slowest stage, and the ends, where one stage a rank is cut best near `ends`; None where none fits."""
        places = [0]
        for block in self.found.blocks:
            places.append(places[-1] + len(block))
        middles = [places.index(end) for end in ends]
        # end of the stages so far -> seconds of the slowest and of all, ends
        best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [0])}
        for stage, middle in enumerate(middles[1:]):
            last = stage == len(middles) - 2
            window = (
                [middle] if last else range(max(1, middle - reach), min(len(places) - 1, middle + reach + 1))
            )
            now: dict[int, tuple[float, float, list[int]]] = {}
            for end in window:
                for start, (slowest, seconds, cuts) in best.items():
                    if start < end:
                        a, b = places[start], places[end]
                        choices = self._rank(stage, [(a, b)])
                        if choices is not None:
                            own = choices[0].seconds + self._early[a]
                            value = (max(slowest, own), seconds + own, [*cuts, b])
                            now[end] = min(now.get(end, value), value)
            best = now
        if not best:
            return None
        slowest, _, cuts = min(best.values())
        return slowest, cuts

    def _rank(self, rank: int, stages: Sequence[tuple[int, int]]) -> tuple[RunChoice, ...] | None:
        """The fastest choices for the stages of a rank; None where it has no room for them."""
        request, crossing = self.request, self.found.crossing
        held = [self._held(*stage) for stage in stages]
        share = self.known.share(held[0] if len(held) == 1 else held[0].union(*held[1:]))
        lasting = share * request.sizes.state_bytes
        if lasting > self.room:
            return None
        gradients = [self.known.share(names) * request.sizes.gradient_bytes for names in held]
        passing = max(crossing[a] + crossing[b] + max(crossing[a], crossing[b]) for a, b in stages)
        always = [self._shared(a, b) + crossing[b] for a, b in stages]

        every = self.moments[rank]

        def taking(stage: int, choice: RunChoice) -> list[float]:
            kept = choice.kept + always[stage]
            return [m.kept[stage] * kept + (choice.over if m.running == stage else 0) for m, _ in every]

        left = self.room - lasting + share * request.sizes.gradient_bytes - passing
        room = [
            left - beside - sum(size for made, size in zip(moment.made, gradients, strict=True) if made)
            for moment, beside in every
        ]
        rows = [self.ways.choices.of(self.ways.kinds[a:b]) for a, b in stages]
        return cheapest(rows, taking, room)

    def _held(self, a: int, b: int) -> frozenset[str]:
        units = [run.unit for run in self.found.runs[a:b]]
        names: frozenset[str] = self.found.once(
            ("held", a, b), lambda: parameters_of(units, self.known, self.found.shared)
        )
        return names

    def _shared(self, a: int, b: int) -> float:
        """Bytes of what several runs of a stage keep, whichever way."""
        return self.found.once(("shared", a, b), lambda: shared_bytes(*self._common(a, b)))

    def _common(self, a: int, b: int) -> Iterator[Shared]:
        for place in range(a, b):
            yield self.found.between[place].shared
            yield from (run.shared for run in self.ways.runs[place])
        if b == len(self.found.runs):
            yield self.found.tail.shared

    @cached_property
    def _early(self) -> list[float]:
        """By run, seconds of what lies between runs before it: every later stage computes that too."""
        found = [0.0]
        for glue in self.found.between:
            found.append(found[-1] + glue.forward)
        return found


def _relieved(
    found: ModelCosts, known: ModelSurvey, ways: RecomputeOptions, stages: Stages
) -> StageRecompute:
    chosen = [way for _, choice in sorted(stages.items()) for way in choice.ways]
    runs = [every[way] for every, way in zip(ways.runs, chosen, strict=True)]
    names = [every[way] for every, way in zip(ways.policies, chosen, strict=True)]
    cuts = sorted(a for a, _ in stages if a)
    policies = {run.unit: name for run, name in zip(runs, names, strict=True) if name}
    return StageRecompute(divide(replace(found, runs=runs), known, cuts), policies)
