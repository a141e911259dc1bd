"""The costs of a recorded model by unit: the work of its units in order, the work between them, and the bytes that cross a cut.

Code between units runs on every stage. So its results are not sent; the unit results that it uses are. This dataflow is the
planner's counterpart of `partition.boundaries.crossing`, which uses a profiled run.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from meshwright_dtensor.strategy import ModuleWork
from meshwright_dtensor.utils.memo import Memo

Shared = frozenset[tuple[int, float]]
"""(number, bytes) of tensors that autograd keeps for several units. A stage keeps each of them once."""


class UnitNames(Protocol):
    """The units of a model; see ModelSurvey."""

    @property
    def units(self) -> tuple[str, ...]: ...
    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...
    @property
    def holding(self) -> Collection[str]: ...
    @property
    def nested(self) -> Collection[str]: ...
    @property
    def module_names(self) -> Mapping[str, tuple[str, ...]]: ...
    def unit(self, module: str) -> str: ...


@dataclass(frozen=True)
class UnitWork:
    """Consecutive work of one unit, or between units.

    Attributes:
        unit: name of the unit, "" between units.
        seconds, forward: predicted seconds, in total and of the forward pass, with collectives.
        saved_bytes: bytes that autograd keeps for this work alone.
        shared: tensors that autograd keeps for this and other work.
        over: peak bytes of the backward, beyond the kept bytes.
        deferred_bytes: bytes kept between the halves of a split backward.
        first: as `over`, in the first half of a split backward: nothing is freed, and the deferred bytes exist.
        inputs: (number of a value, module that made it, bytes).
        forward_collectives, backward_collectives: of `seconds`, those of collectives in each pass.
    """

    unit: str
    seconds: float = 0.0
    forward: float = 0.0
    saved_bytes: float = 0.0
    shared: Shared = frozenset()
    over: float = 0.0
    deferred_bytes: float = 0.0
    inputs: frozenset[tuple[int, str, int]] = frozenset()
    first: float = 0.0
    forward_collectives: float = 0.0
    backward_collectives: float = 0.0

    @property
    def compute(self) -> float:
        """Seconds without collectives."""
        return self.seconds - self.forward_collectives - self.backward_collectives

    @property
    def kept(self) -> float:
        """Bytes that autograd keeps."""
        return self.saved_bytes + shared_bytes(self.shared)

    def then(self, other: UnitWork) -> UnitWork:
        """This work, followed by other work."""
        shared = self.shared | other.shared
        later = other.saved_bytes + shared_bytes(shared) - shared_bytes(self.shared)
        return UnitWork(
            self.unit,
            self.seconds + other.seconds,
            self.forward + other.forward,
            self.saved_bytes + other.saved_bytes,
            shared,
            max(self.over - later, other.over),
            self.deferred_bytes + other.deferred_bytes,
            self.inputs | other.inputs,
            max(self.first + other.deferred_bytes, other.first),
            self.forward_collectives + other.forward_collectives,
            self.backward_collectives + other.backward_collectives,
        )

    def after(self, earlier: Iterable[UnitWork]) -> UnitWork:
        """This work where the forwards of earlier code run again, which keeps nothing."""
        early, collectives = 0.0, 0.0
        for work in earlier:
            early += work.forward
            collectives += work.forward_collectives
        return replace(
            self,
            seconds=self.seconds + early,
            forward=self.forward + early,
            forward_collectives=self.forward_collectives + collectives,
        )


NO_WORK = UnitWork("")


def sum_work(unit: str, parts: Iterable[ModuleWork], before: UnitWork = NO_WORK) -> UnitWork:
    """The work of modules in order, after `before`. Same as `UnitWork.then` for each part, but faster."""
    seconds, forward, saved, shared = before.seconds, before.forward, before.saved_bytes, before.shared
    deferred, over, inputs, first = before.deferred_bytes, before.over, set(before.inputs), before.first
    sent, returned = before.forward_collectives, before.backward_collectives
    for part in parts:
        seconds += part.seconds
        forward += part.seconds * part.forward
        later = part.saved_bytes
        if part.shared:
            both = shared | part.shared
            later = part.saved_bytes + shared_bytes(both) - shared_bytes(shared)
            shared = both
        over = max(over - later, part.transient_bytes)
        first = max(first + part.deferred_bytes, part.transient_bytes)
        saved += part.saved_bytes
        deferred += part.deferred_bytes
        inputs |= part.inputs
        sent += part.collectives[0]
        returned += part.collectives[1]
    return UnitWork(
        unit, seconds, forward, saved, shared, over, deferred, frozenset(inputs), first, sent, returned
    )


@dataclass(frozen=True)
class ModelCosts:
    """The costs of one microbatch of a model, by unit.

    Attributes:
        work: the recorded work.
        shared: units that all stages hold.
        runs: the work of the other units, in order.
        between: the work before each run. A stage does all of it up to its last run.
        tail: the work after all runs, on the last stage.
        blocks: runs that stay on one stage.
        whole, collectives: total seconds of compute, and of collectives.
        kept: total bytes that autograd keeps.
        crossing, returning: for each run, the bytes that cross a cut before it, and bytes of gradients that cross it.
        memo: what follows from these costs.
    """

    work: tuple[ModuleWork, ...]
    shared: list[str]
    runs: list[UnitWork]
    between: list[UnitWork]
    tail: UnitWork
    blocks: list[list[UnitWork]]
    whole: float
    collectives: float
    kept: float
    crossing: list[int]
    returning: list[int]
    memo: Memo = field(default_factory=Memo)

    def load(self, start: int, end: int) -> UnitWork:
        """The work of a stage with the runs from `start` to `end`.

        It also runs the code between earlier runs, but keeps nothing of it: no gradient flows there.
        """
        work = NO_WORK
        for between, run in zip(self.between[start:end], self.runs[start:end], strict=True):
            work = work.then(between).then(run)
        if end == len(self.runs):
            work = work.then(self.tail)
        return work.after(self.between[:start])


def model_costs(work: tuple[ModuleWork, ...], units: UnitNames) -> ModelCosts:
    """The costs of a model from its recorded work."""
    work = work_in_units(work, units)
    shared = units_read_outside(work, units)
    runs, between, tail = group_by_unit(work, units, shared)
    parts = (*runs, *between, tail)
    kept = sum(part.saved_bytes for part in parts) + shared_bytes(*(part.shared for part in parts))
    collectives = sum(sum(part.collectives) for part in work)
    whole = sum(part.seconds for part in work) - collectives or 1.0
    # a run of a unit with parameters, and the following runs of units without (dropouts)
    holding, blocks = units.holding, list[list[UnitWork]]()
    for run in runs:
        if blocks and (run.unit not in holding or all(r.unit not in holding for r in blocks[-1])):
            blocks[-1].append(run)
        else:
            blocks.append([run])
    flow = flow_of(work, units, shared)
    tail, values, gradients = replace(tail, inputs=flow.final), flow.crossing(False), flow.crossing(True)
    return ModelCosts(
        work, shared, runs, between, tail, blocks, whole, collectives, kept or 1.0, values, gradients
    )


def work_in_units(work: Sequence[ModuleWork], units: UnitNames) -> tuple[ModuleWork, ...]:
    """The same work, where a module of several units (one activation object in all blocks, say) belongs to the one that runs.

    A module is recorded by its first name, so that its other calls would look like calls of the first unit, or of none. It
    belongs to the unit that ran before it, or else to the one that runs after it.
    """
    result, running, following = list[ModuleWork](), "", ""
    after: list[str] = []
    for part in reversed(work):
        after.append(following)
        following = following if part.module in units.module_names else units.unit(part.module)
    for part, following in zip(work, reversed(after), strict=True):
        aliases = units.module_names.get(part.module, ())
        names = {unit: alias for alias in reversed(aliases) if (unit := units.unit(alias))}
        alias = names.get(running, names.get(following))
        result.append(part if alias is None else replace(part, module=alias))
        running = units.unit(result[-1].module)
    return tuple(result)


def group_by_unit(
    work: Sequence[ModuleWork], units: UnitNames, shared: Sequence[str]
) -> tuple[list[UnitWork], list[UnitWork], UnitWork]:
    """The work of each run of a unit, the work before each of them, and the work after all. `shared`: units that do not count."""
    runs: list[UnitWork] = []
    between: list[UnitWork] = []
    outside: list[ModuleWork] = []
    for unit, parts in itertools.groupby(work, lambda part: units.unit(part.module)):
        if not unit or unit in shared:
            outside += parts
        elif runs and runs[-1].unit == unit:
            between[-1] = between[-1].then(sum_work("", outside))
            runs[-1] = sum_work(unit, parts, runs[-1])
            outside = []
        else:
            between.append(sum_work("", outside))
            runs.append(sum_work(unit, parts))
            outside = []
    works = [*runs, *between, sum_work("", outside)]
    # shared tensors that only one of them keeps count as its saved bytes
    times = Counter(key for run in works for key, _ in run.shared)
    for place, run in enumerate(works):
        alone = sum(size for key, size in run.shared if times[key] == 1)
        common = frozenset((key, size) for key, size in run.shared if times[key] > 1)
        works[place] = replace(run, saved_bytes=run.saved_bytes + alone, shared=common)
    return works[: len(runs)], works[len(runs) : -1], works[-1]


def units_read_outside(work: Sequence[ModuleWork], units: UnitNames) -> list[str]:
    """Units that are called or whose parameters are used in other units. Every stage has to hold these units."""
    read: set[str] = set()
    for part in work:
        here = units.unit(part.module)
        for name in part.parameters:
            owners = {units.unit(alias) for alias in units.names.get(name, (name,))}
            # between units, a part of a unit may be called by a name of its own
            if here not in owners or not here:
                read |= owners - {""}
    return [unit for unit in units.units if unit in read or unit in units.nested]


def shared_bytes(*shared: Shared) -> float:
    """Bytes of shared tensors, each counted once."""
    empty: Shared = frozenset()
    return sum(size for _, size in empty.union(*shared))


# ---- dataflow
Values = frozenset[int]
_NONE: Values = frozenset()


@dataclass
class Flow:
    """The unit results, by value number.

    Attributes:
        runs: number of runs of units.
        producer, modules: the run and the module that produce a result.
        last_user: the last run that uses it; `runs` for the code after all units.
        sizes: bytes on one rank.
        trained: results that get a gradient.
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
        used = [i for i, run in self.last_user.items() if run == self.runs]
        return frozenset((i, self.modules[i], self.sizes[i]) for i in used)

    def crossing(self, gradients: bool) -> list[int]:
        """For each run, the bytes that cross a cut before it: values, or their `gradients`; 0 after the last run."""
        change = [0] * (self.runs + 2)
        for i, last in self.last_user.items():
            if last > self.producer[i] and (i in self.trained or not gradients):
                change[self.producer[i] + 1] += self.sizes[i]
                change[last + 1] -= self.sizes[i]
        return [*itertools.accumulate(change[: self.runs]), 0]


def flow_of(work: Sequence[ModuleWork], owners: UnitNames, shared: Collection[str]) -> Flow:
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
