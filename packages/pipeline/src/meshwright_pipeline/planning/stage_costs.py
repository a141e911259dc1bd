"""Where to cut a sequence of costs into runs.

A model divided into stages: units, work, parameters and messages of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshwright_dtensor.errors import PlanError
from meshwright_pipeline.planning.survey import ModelSurvey
from meshwright_pipeline.planning.unit_costs import ModelCosts, UnitWork


def linear_partition(costs: Sequence[float], count: int) -> list[int]:
    """Where to cut a sequence into `count` runs whose largest sum is smallest: `count` - 1 ascending places.

    Dynamic programming over prefixes, exact; of equal answers the one with the earliest cuts. No run is empty.

    Raises:
        ValueError: fewer elements than runs.
    """
    total = len(costs)
    if total < count:
        raise ValueError(f"{total} elements cannot be cut into {count} runs that are not empty")
    prefix = [0.0]
    for cost in costs:
        prefix.append(prefix[-1] + cost)
    # best[i]: smallest largest sum of the first i elements in the runs so far, and where the last of these begins
    best = [prefix[i] for i in range(total + 1)]
    starts: list[list[int]] = []
    for runs in range(2, count + 1):
        new, where = [float("inf")] * (total + 1), [0] * (total + 1)
        for end in range(runs, total + 1):
            for begin in range(end - 1, runs - 2, -1):
                last = prefix[end] - prefix[begin]
                if last > new[end]:
                    break  # it only grows
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
    """Stages of a model.

    Args:
        cuts: runs that begin a stage, but for the first.
        stages: units of each.
        loads: its work on a microbatch.
        held: first names of the parameters that it holds.
        shares: their part of all bytes of parameters.
        sizes: how many units and parameters it has.
        messages: bytes that cross the cut behind each but the last.
        returned: bytes of the gradients that come back over it.
    """

    cuts: tuple[int, ...]
    stages: list[list[str]]
    loads: list[UnitWork]
    held: list[frozenset[str]]
    shares: list[float]
    sizes: list[tuple[int, int]]
    messages: list[int]
    returned: list[int]


def even_cuts(found: ModelCosts, known: ModelSurvey, ranks: int, stages: int) -> tuple[int, ...]:
    """Where to cut so that the slowest stage is fastest.

    Raises:
        PlanError: there are fewer modules than stages.
    """
    blocks = found.blocks
    here = len({run.unit for block in blocks for run in block} & known.holding)
    if here < stages:
        text = f"{stages} stages need as many modules that can be given to one, and the model has {here}"
        raise PlanError("degrees.pp", ranks, text, str(max(1, here // (stages // ranks))))
    seconds = [sum(run.seconds for run in block) for block in blocks]
    seconds[-1] += found.tail.seconds
    return tuple(sum(map(len, blocks[:place])) for place in linear_partition(seconds, stages))


def divide(found: ModelCosts, known: ModelSurvey, cuts: Sequence[int]) -> StageDivision:
    """The model cut before these runs."""
    shared, runs = found.shared, found.runs
    ends = list(zip([0, *cuts], [*cuts, len(runs)], strict=True))
    stages = _stages([[run.unit for run in runs[a:b]] for a, b in ends], known, shared)
    held = [parameters_of(stage, known, shared) for stage in stages]
    return StageDivision(
        tuple(cuts),
        stages,
        [found.load(a, b) for a, b in ends],
        held,
        [known.share(names) for names in held],
        [(len(stage), len(names)) for stage, names in zip(stages, held, strict=True)],
        [found.crossing[place] for place in cuts],
        [found.returning[place] for place in cuts],
    )


def _stages(parts: Sequence[Sequence[str]], known: ModelSurvey, shared: Sequence[str]) -> list[list[str]]:
    """The units of each stage in the order of registration, with those that did nothing beside the one before them.

    What has no parameters and did nothing (a dropout of 0) is left to every stage: it may be called anywhere.
    """
    holding = known.holding
    stages: list[list[str]] = [list(dict.fromkeys(part)) for part in parts]
    placed = {unit: index for index, stage in reversed(list(enumerate(stages))) for unit in stage}
    current = 0
    for unit in known.units:
        if unit in placed:
            current = placed[unit]
        elif unit not in shared and unit in holding:
            stages[current].append(unit)
    place = {unit: index for index, unit in enumerate(known.units)}
    return [sorted(stage, key=place.__getitem__) for stage in stages]


def parameters_of(stage: Sequence[str], known: ModelSurvey, shared: Sequence[str]) -> frozenset[str]:
    """First names of the parameters that a stage holds."""
    nothing: frozenset[str] = frozenset()
    return nothing.union(*(known.inside.get(unit, nothing) for unit in {*stage, *shared, ""}))
