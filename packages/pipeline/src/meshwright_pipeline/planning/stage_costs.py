"""Divides a model into stages, and gives the units, work, parameters and messages of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from meshwright_dtensor.errors import PlanError
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import ModelCosts, UnitWork


def linear_partition(costs: Sequence[float], count: int) -> list[int]:
    """Cut a sequence into `count` non-empty parts so that the largest sum is smallest: `count` - 1 ascending places.

    Exact dynamic programming over prefixes. Of equal solutions it takes the one with the earliest cuts.

    Raises ValueError: fewer elements than parts.
    """
    total = len(costs)
    if total < count:
        raise ValueError(f"{total} elements cannot be cut into {count} non-empty parts")
    prefix = [*accumulate(costs, initial=0.0)]
    # best[i]: smallest largest sum of the first i elements in the parts so far; starts: where the last part begins
    best = [prefix[i] for i in range(total + 1)]
    starts: list[list[int]] = []
    for runs in range(2, count + 1):
        new, where = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(runs, total + 1):
            for begin in range(end - 1, runs - 2, -1):
                last = prefix[end] - prefix[begin]
                if last > new[end]:
                    # it only grows from here
                    break
                value = max(best[begin], last)
                if value <= new[end]:
                    new[end], where[end] = value, begin
        best = new
        starts.append(where)
    cuts: list[int] = []
    end = total
    for where in reversed(starts):
        end = where[end]
        cuts.append(end)
    return cuts[::-1]


@dataclass(frozen=True)
class StageDivision:
    """The stages of a model.

    Args:
        cuts: the first run of each stage but the first.
        stages, loads: units of each stage, and their work on a microbatch, collectives included.
        held, shares: first names of the parameters of each stage, and their share of all parameter bytes.
        sizes: number of units and parameters of each stage.
        messages, returned: bytes that cross the boundary after each stage but the last, and bytes of their gradients.
    """

    cuts: tuple[int, ...]
    stages: list[list[str]]
    loads: list[UnitWork]
    held: list[frozenset[str]]
    shares: list[float]
    sizes: list[tuple[int, int]]
    messages: list[int]
    returned: list[int]


def even_cuts(model: ModelCosts, survey: ModelSurvey, ranks: int, stages: int) -> tuple[int, ...]:
    """The cuts for which the slowest stage is fastest. Raises PlanError: there are fewer modules than stages."""
    blocks = model.blocks
    units = {run.unit for block in blocks for run in block} & survey.holding
    if len(units) < stages:
        nearest = str(max(1, len(units) // (stages // ranks)))
        raise PlanError("degrees.pp", ranks, survey.too_few(units), nearest)
    seconds = [sum(run.seconds for run in block) for block in blocks]
    seconds[-1] += model.tail.seconds
    return tuple(sum(map(len, blocks[:place])) for place in linear_partition(seconds, stages))


def divide(model: ModelCosts, survey: ModelSurvey, cuts: Sequence[int]) -> StageDivision:
    """Cut the model before these runs."""
    shared, runs = model.shared, model.runs
    ends = list(zip([0, *cuts], [*cuts, len(runs)], strict=True))
    stages = _stages([[run.unit for run in runs[a:b]] for a, b in ends], survey, shared)
    held = [parameters_of(stage, survey, shared) for stage in stages]
    loads, shares = [model.load(a, b) for a, b in ends], [survey.share(names) for names in held]
    sizes = [(len(stage), len(names)) for stage, names in zip(stages, held, strict=True)]
    messages, returned = ([table[place] for place in cuts] for table in (model.crossing, model.returning))
    return StageDivision(tuple(cuts), stages, loads, held, shares, sizes, messages, returned)


def _stages(parts: Sequence[Sequence[str]], survey: ModelSurvey, shared: Sequence[str]) -> list[list[str]]:
    """The units of each stage in the order of registration. Units that did not run join the stage of the previous unit.

    A unit without parameters that did not run (a dropout of 0) is left to every stage, since it may be called anywhere.
    """
    stages: list[list[str]] = [list(dict.fromkeys(part)) for part in parts]
    placed = {unit: index for index, stage in reversed(list(enumerate(stages))) for unit in stage}
    current = 0
    for unit in survey.units:
        if unit in placed:
            current = placed[unit]
        elif unit not in shared and unit in survey.holding:
            stages[current].append(unit)
    place = {unit: index for index, unit in enumerate(survey.units)}
    return [sorted(stage, key=place.__getitem__) for stage in stages]


def parameters_of(stage: Sequence[str], survey: ModelSurvey, shared: Sequence[str]) -> frozenset[str]:
    """First names of the parameters that a stage holds."""
    empty: frozenset[str] = frozenset()
    return empty.union(*(survey.inside.get(unit, empty) for unit in {*stage, *shared, ""}))
