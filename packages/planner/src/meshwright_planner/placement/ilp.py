"""The integer program itself: columns and rows as they are added, the solver, and what its columns stand for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.states import State
from meshwright_planner.cost.prices import Collective

Phase: TypeAlias = Literal["forward", "backward"]

GAP = 1e-4
"""Part by which what the solver calls optimal may be above the least."""

WHOLE = 1e-6
"""How far from a whole number a column may be, as the solver has it."""

INFEASIBLE = 2
"""What scipy's milp says of a program without a solution."""


@dataclass(frozen=True)
class Conversion:
    """A collective between a producer and its consumers.

    Args:
        value: representative value that is converted.
        source, target: states; several targets of one forward kind share a collective, the first is named.
        phase: pass in which it happens.
        collective: kind and bytes of the full tensor.
        count: occurrences in one step.
        consumers: representative (node, input position) pairs it serves.
    """

    value: int
    source: State
    target: State
    phase: Phase
    collective: Collective
    count: int
    consumers: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class MemoryTerms:
    """What a byte of memory is worth, and how many there are.

    Args:
        price: seconds per byte.
        parameter_factor: bytes of parameter, gradient and optimizer state per byte of parameter.
        limit: bytes of parameters (times the factor) and saved activations allowed, or None.
    """

    price: float
    parameter_factor: float
    limit: float | None = None


class Unsolved(PlanError):
    """The solver stopped before it had found a placement, or that there is none."""


def placement_of(answer: Any, time_limit: float) -> bool:
    """Whether the solver found a placement; False where it found that there is none.

    Raises:
        Unsolved: it found neither.
    """
    if answer.x is not None:
        return True
    if answer.status == INFEASIBLE or "infeasible" in str(answer.message).lower():
        return False
    raise Unsolved(
        "parameters",
        "searched",
        f"no placement was found in {time_limit:.0f} s, which says nothing of whether there is one; pin more degrees, or "
        "give time_budget more where it is given",
    )


@dataclass
class Program:
    """Columns and rows of the integer program as they are added."""

    cost: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    entries: list[float] = field(default_factory=list)
    low: list[float] = field(default_factory=list)
    high: list[float] = field(default_factory=list)

    def variable(self, cost: float, integer: bool = False, memory: float = 0.0) -> int:
        self.cost.append(cost)
        self.integer.append(int(integer))
        self.memory.append(memory)
        return len(self.cost) - 1

    def constrain(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """A row: the sum of these columns, each times its entry, lies between the two."""
        columns, entries = zip(*terms) if terms else ((), ())
        self._row(columns, entries, low, high)

    def compare(self, more: Sequence[int], less: Sequence[int], low: float, high: float) -> None:
        """A row: the sum of some columns less that of others lies between the two."""
        self._row((*more, *less), (*((1.0,) * len(more)), *((-1.0,) * len(less))), low, high)

    def _row(self, columns: Sequence[int], entries: Sequence[float], low: float, high: float) -> None:
        self.lengths.append(len(columns))
        self.columns.extend(columns)
        self.entries.extend(entries)
        self.low.append(low)
        self.high.append(high)

    def solve(self, time_limit: float) -> Any:
        """What scipy's milp says of it; `time_limit`: seconds."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        entries, columns = np.asarray(self.entries, dtype=float), np.asarray(self.columns, dtype=int)
        matrix = scipy.sparse.csc_matrix((entries, (rows, columns)), shape=(len(self.low), len(self.cost)))
        cost = np.asarray(self.cost)
        scale = 1.0 / max(
            float(np.max(np.abs(cost), initial=0.0)), 1e-12
        )  # the solver's tolerances are absolute
        limits = LinearConstraint(matrix, np.asarray(self.low), np.asarray(self.high))

        def solved(integer: Any, seconds: float, presolve: bool) -> Any:
            return milp(
                cost * scale * 1e3,
                constraints=limits,
                integrality=integer,
                bounds=Bounds(0, 1),
                options={"time_limit": seconds, "mip_rel_gap": GAP, "presolve": presolve},
            )

        # most of these programs have a whole vertex at their relaxation's best, which is found in half the time, sooner as it is
        start, integer = time.perf_counter(), np.asarray(self.integer)
        relaxed = solved(np.zeros_like(integer), time_limit, False)
        if relaxed.status == INFEASIBLE or (relaxed.status == 0 and _whole(relaxed.x[integer > 0])):
            return relaxed
        return solved(integer, max(0.0, time_limit - (time.perf_counter() - start)), True)


def _whole(values: Any) -> bool:
    return bool(np.all(np.abs(values - np.round(values)) <= WHOLE))


class User(NamedTuple):
    """A consumer that may need a collective: input `position` of `node` in state `target`, by variable `edge`."""

    node: int
    position: int
    target: State
    edge: int


@dataclass
class Event:
    """A collective that may happen: by variable `column`, or where that is None whenever one of its users asks."""

    value: int
    source: State
    phase: Phase
    collective: Collective
    count: int
    users: list[User] = field(default_factory=list)
    column: int | None = None

    def chosen(self, x: Any) -> Conversion:
        """What it is in a solution."""
        users = [u for u in self.users if x[u.edge] > 0.5]
        target = users[0].target if users else self.users[0].target
        consumers = tuple((u.node, u.position) for u in users)
        return Conversion(self.value, self.source, target, self.phase, self.collective, self.count, consumers)
