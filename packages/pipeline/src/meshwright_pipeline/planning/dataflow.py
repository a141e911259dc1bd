"""Dataflow between units in the planner's record: which unit results cross a cut.

Code between units runs on every stage. So its results are not sent; the unit results that it uses are. This is the
planner's counterpart of `partition.boundaries.crossing`, which uses a profiled run.
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
    """Maps modules to units."""

    def unit(self, module: str) -> str:
        """The unit that contains a module, "" if none does."""
        ...


@dataclass
class Flow:
    """The unit results, by value number.

    Attributes:
        runs: number of runs of units.
        producer: the run that produces a result.
        last_user: the last run that uses it; `runs` for the code after all units.
        sizes: bytes on one rank.
        trained: results that get a gradient.
        modules: the module that produced a result.
    """

    runs: int = 0
    producer: dict[int, int] = field(default_factory=dict)
    last_user: dict[int, int] = field(default_factory=dict)
    sizes: dict[int, int] = field(default_factory=dict)
    trained: set[int] = field(default_factory=set)
    modules: dict[int, str] = field(default_factory=dict)

    @property
    def final(self) -> frozenset[tuple[int, str, int]]:
        """(number, producing module, bytes) of the results that the code after the last unit uses."""
        return frozenset(
            (i, self.modules[i], self.sizes[i]) for i, run in self.last_user.items() if run == self.runs
        )

    def crossing(self, gradients: bool) -> list[int]:
        """For each run, the bytes that cross a cut before it: values, or their `gradients`; 0 after the last run."""
        change = [0] * (self.runs + 2)
        for i, last in self.last_user.items():
            if last > self.producer[i] and (i in self.trained or not gradients):
                change[self.producer[i] + 1] += self.sizes[i]
                change[last + 1] -= self.sizes[i]
        return [*itertools.accumulate(change[: self.runs]), 0]


def flow_of(work: Sequence[ModuleWork], owners: Owners, shared: Collection[str]) -> Flow:
    """The dataflow of a recorded model. `shared`: units that all stages hold, which send nothing."""
    flow = Flow()
    # value -> the unit results that it depends on
    sources_of: dict[int, Values] = {}
    # unit -> its first run
    first: dict[str, int] = {}
    before, after = "", list[ModuleWork]()

    def results(part: ModuleWork) -> Values:
        """The unit results that a part of the work uses."""
        used = set[int]()
        for number, module, size in part.inputs:
            # only the producing module is recorded
            if number not in sources_of:
                place = first.get(owners.unit(module))
                sources_of[number] = _NONE if place is None else frozenset({number})
                if place is not None:
                    flow.producer[number], flow.modules[number] = place, module
                    flow.trained.add(number)
            if number in flow.producer:
                flow.sizes[number] = size
            used |= sources_of[number]
        return frozenset(used)

    for part in work:
        unit = owners.unit(part.module)
        used = results(part)
        if not unit or unit in shared:
            after.append(part)
            for number, sources, _ in part.outputs:
                sources_of[number] = _NONE.union(*(sources_of.get(source, _NONE) for source in sources))
            continue
        after.clear()
        if unit != before:
            flow.runs, before = flow.runs + 1, unit
        place = flow.runs - 1
        first.setdefault(unit, place)
        for number in used:
            if flow.producer[number] != place:
                flow.last_user[number] = place
        for number, _, trained in part.outputs:
            sources_of[number] = frozenset({number})
            flow.producer[number], flow.modules[number] = place, part.module
            if trained:
                flow.trained.add(number)
    for part in after:
        flow.last_user.update(dict.fromkeys(results(part), flow.runs))
    return flow
