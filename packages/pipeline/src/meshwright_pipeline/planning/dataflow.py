"""What crosses the cuts of a recorded model, as planning sees it: results of units, followed through the code between them.

Code between units runs on every stage. So nothing that it makes is sent, but the results of units that it makes it of: what
`cutting.crossing` finds on a watched run, this finds in what strategies are told of the work of modules.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from meshwright_dtensor.strategy import ModuleWork

Values = frozenset[int]
_NONE: Values = frozenset()


class Owners(Protocol):
    """Says which unit a module lies in."""

    def unit(self, module: str) -> str:
        """Its name, "" where there is none."""
        ...


@dataclass
class Flow:
    """Results of units, by their numbers.

    Attributes:
        runs: how many runs of units there are.
        made: the run that makes it.
        taken: the last run that takes it; of what the code behind all units takes, the number of runs.
        sizes: bytes on one rank.
        trained: those that get a gradient.
        modules: who made it.
    """

    runs: int = 0
    made: dict[int, int] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    modules: dict[int, str] = field(default_factory=dict)

    @property
    def final(self) -> frozenset[tuple[int, str, int]]:
        """(number, module that made it, bytes) of those that the code behind the last unit takes."""
        return frozenset(
            (i, self.modules[i], self.sizes[i]) for i, run in self.taken.items() if run == self.runs
        )

    def crossing(self, gradients: bool) -> list[int]:
        """Bytes that cross a cut, by the run that it is before: values, or their `gradients`; none behind the last run."""
        change = [0] * (self.runs + 2)
        for i, taken in self.taken.items():
            if taken > self.made[i] and (i in self.trained or not gradients):
                change[self.made[i] + 1] += self.sizes[i]
                change[taken + 1] -= self.sizes[i]
        return [*itertools.accumulate(change[: self.runs]), 0]


def flow_of(work: Sequence[ModuleWork], known: Owners, shared: Collection[str]) -> Flow:
    """That of a recorded model; `shared`: units that all stages hold, which send nothing."""
    flow = Flow()
    of: dict[int, Values] = {}  # value -> the results of units that it is made of
    first: dict[str, int] = {}  # unit -> its first run
    before, behind = "", list[ModuleWork]()

    def results(part: ModuleWork) -> Values:
        """The results of units that a part of the work takes."""
        found = set[int]()
        for number, module, size in part.inputs:
            if number not in of:  # nothing is said of where it comes from, but who made it
                place = first.get(known.unit(module))
                of[number] = _NONE if place is None else frozenset({number})
                if place is not None:
                    flow.made[number], flow.modules[number] = place, module
                    flow.trained.add(number)
            if number in flow.made:
                flow.sizes[number] = size
            found |= of[number]
        return frozenset(found)

    for part in work:
        unit = known.unit(part.module)
        taken = results(part)
        if not unit or unit in shared:
            behind.append(part)
            for number, sources, _ in part.outputs:
                of[number] = _NONE.union(*(of.get(source, _NONE) for source in sources))
            continue
        behind.clear()
        if unit != before:
            flow.runs, before = flow.runs + 1, unit
        place = flow.runs - 1
        first.setdefault(unit, place)
        for number in taken:
            if flow.made[number] != place:
                flow.taken[number] = place
        for number, _, trained in part.outputs:
            of[number] = frozenset({number})
            flow.made[number], flow.modules[number] = place, part.module
            if trained:
                flow.trained.add(number)
    for part in behind:
        flow.taken.update(dict.fromkeys(results(part), flow.runs))
    return flow
