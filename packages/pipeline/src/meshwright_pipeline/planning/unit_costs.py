"""What a recorded model has to divide: the work of its units, one after the other, and what is done between them."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from meshwright_dtensor.strategy import ModuleWork
from meshwright_pipeline.planning.dataflow import flow_of

T = TypeVar("T")
Shared = frozenset[tuple[int, float]]
"""(number of a tensor, bytes) of what autograd keeps for several units, once on each stage."""


class UnitNames(Protocol):
    """What is known of the units of a model."""

    @property
    def units(self) -> tuple[str, ...]: ...
    @property
    def names(self) -> Mapping[str, tuple[str, ...]]: ...
    def unit(self, module: str) -> str: ...


@dataclass(frozen=True)
class UnitWork:
    """Consecutive work of one unit, or of what lies between units.

    Attributes:
        unit: its name, "" where it is none.
        seconds, forward: predicted, and those of the forward pass.
        saved_bytes: what autograd keeps of it alone.
        shared: what it keeps of it and of others.
        over: the most bytes that are alive while it runs backward, beyond all that it keeps itself.
        waiting: bytes that lie between the halves of a split backward.
        first: as `over`, in the first half of a split backward: nothing is freed, and what waits is there already.
        entering: (number of a value, module that made it, bytes).
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

    @property
    def kept(self) -> float:
        """Bytes that autograd keeps."""
        return self.saved_bytes + shared_bytes(self.shared)

    def then(self, other: UnitWork) -> UnitWork:
        """This, and another behind it."""
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
        )


NO_WORK = UnitWork("")


def sum_work(unit: str, parts: Iterable[ModuleWork], before: UnitWork = NO_WORK) -> UnitWork:
    """The work of modules, one behind the other, behind what came before: as `UnitWork.then`, part by part, but made once."""
    seconds, forward, saved, waiting = (
        before.seconds,
        before.forward,
        before.saved_bytes,
        before.deferred_bytes,
    )
    over, shared, entering, first = before.over, before.shared, set(before.inputs), before.first
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
        waiting += part.deferred_bytes
        entering |= part.inputs
    return UnitWork(unit, seconds, forward, saved, shared, over, waiting, frozenset(entering), first)


@dataclass(frozen=True)
class ModelCosts:
    """The work of a model as it is divided.

    Attributes:
        work: what was read, of one microbatch, as is all else here.
        shared: units that all stages hold.
        runs: the work of the others.
        between: what lies before each of them: a stage does all that comes before its last run.
        tail: what comes behind all of them; the last stage does it.
        blocks: runs that stay together.
        whole: seconds in all.
        kept: bytes that autograd keeps in all.
        crossing: bytes that cross a cut, by the run that it is before.
        returning: bytes of the gradients that come back.
        found: what was asked of it before, and the answer.
    """

    work: tuple[ModuleWork, ...]
    shared: list[str]
    runs: list[UnitWork]
    between: list[UnitWork]
    tail: UnitWork
    blocks: list[list[UnitWork]]
    whole: float
    kept: float
    crossing: list[int]
    returning: list[int]
    found: dict[object, Any] = field(default_factory=dict)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, made once for a key; what the other axes do with the same work changes nothing."""
        if key not in self.found:
            self.found[key] = make()
        answer: T = self.found[key]
        return answer

    def load(self, start: int, end: int) -> UnitWork:
        """What the stage with the runs from `start` to `end` does.

        What lies between earlier runs takes it time too, but keeps nothing: no gradient comes by there.
        """
        own = NO_WORK
        for glue, run in zip(self.between[start:end], self.runs[start:end], strict=True):
            own = own.then(glue).then(run)
        if end == len(self.runs):
            own = own.then(self.tail)
        early = self.between[:start]
        return replace(
            own,
            seconds=own.seconds + sum(run.forward for run in early),
            forward=own.forward + sum(run.forward for run in early),
        )


def model_costs(work: tuple[ModuleWork, ...], known: UnitNames, holding: frozenset[str]) -> ModelCosts:
    """Read the work of a model; `holding`: the units with parameters."""
    shared = units_read_outside(work, known)
    runs, between, tail = group_by_unit(work, known, shared)
    every = (*runs, *between, tail)
    kept = sum(run.saved_bytes for run in every) + shared_bytes(*(run.shared for run in every))
    whole = sum(part.seconds for part in work) or 1.0
    blocks = _blocks(runs, holding)
    flow = flow_of(work, known, shared)
    tail = replace(tail, inputs=flow.final)
    return ModelCosts(
        work,
        shared,
        runs,
        between,
        tail,
        blocks,
        whole,
        kept or 1.0,
        flow.crossing(False),
        flow.crossing(True),
    )


def group_by_unit(
    work: Sequence[ModuleWork], known: UnitNames, shared: Sequence[str]
) -> tuple[list[UnitWork], list[UnitWork], UnitWork]:
    """Work as runs of units, what lies before each of them, and what is behind all; `shared`: units that are none."""
    runs: list[UnitWork] = []
    between: list[UnitWork] = []
    waiting: list[ModuleWork] = []
    for unit, parts in itertools.groupby(work, lambda part: known.unit(part.module)):
        if not unit or unit in shared:
            waiting += parts
        elif runs and runs[-1].unit == unit:
            between[-1] = between[-1].then(sum_work("", waiting))
            runs[-1] = sum_work(unit, parts, runs[-1])
            waiting = []
        else:
            between.append(sum_work("", waiting))
            runs.append(sum_work(unit, parts))
            waiting = []
    *both, tail = _folded([*runs, *between, sum_work("", waiting)])
    return both[: len(runs)], both[len(runs) :], tail


def units_read_outside(work: Sequence[ModuleWork], known: UnitNames) -> list[str]:
    """Units whose parameters are computed with outside of them: every stage has to hold those."""
    found: set[str] = set()
    for part in work:
        here = known.unit(part.module)
        for name in part.parameters:
            owners = {known.unit(alias) for alias in known.names.get(name, (name,))}
            if here not in owners:
                found |= owners - {""}
    return [unit for unit in known.units if unit in found]


def shared_bytes(*shared: Shared) -> float:
    """Bytes of what several keep, each tensor once."""
    nothing: Shared = frozenset()
    return sum(size for _, size in nothing.union(*shared))


def _folded(runs: Sequence[UnitWork]) -> list[UnitWork]:
    """What only one of them keeps counts as its own."""
    times = Counter(key for run in runs for key, _ in run.shared)
    found = []
    for run in runs:
        own = sum(size for key, size in run.shared if times[key] == 1)
        left = frozenset((key, size) for key, size in run.shared if times[key] > 1)
        found.append(replace(run, saved_bytes=run.saved_bytes + own, shared=left))
    return found


def _blocks(runs: Sequence[UnitWork], holding: frozenset[str]) -> list[list[UnitWork]]:
    """Runs that stay together: one of a unit with parameters, and those of units without any behind it (dropouts)."""
    found = list[list[UnitWork]]()
    for run in runs:
        if found and (run.unit not in holding or all(r.unit not in holding for r in found[-1])):
            found[-1].append(run)
        else:
            found.append([run])
    return found
