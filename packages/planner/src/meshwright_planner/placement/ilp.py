"""The integer program of a placement problem: columns, rows, solver, and what a problem provides to build it."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.states import State
from meshwright_planner.cost.prices import AxisCosts, Collective
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Saved, Tape

Phase: TypeAlias = Literal["forward", "backward"]

GAP = 1e-4
"""Largest relative distance between a solution that the solver calls optimal and the optimum."""

INTEGRALITY = 1e-6
"""Largest distance of a column of a solution from an integer."""

INFEASIBLE = 2
"""Status of scipy's milp for a program without a solution."""


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
    """Price and limit of memory.

    Args:
        price: seconds per byte.
        parameter_factor: bytes of parameter, gradient and optimizer state per byte of parameter.
        limit: bytes of parameters (times the factor) and saved activations allowed, or None.
    """

    price: float
    parameter_factor: float
    limit: float | None = None


class Unsolved(PlanError):
    """The solver stopped before it found a placement or proved that there is none."""


def solution_exists(answer: Any, time_limit: float) -> bool:
    """Whether the solver found a placement; False: it proved that there is none.

    Raises:
        Unsolved: neither.
    """
    if answer.x is not None:
        return True
    if answer.status == INFEASIBLE or "infeasible" in str(answer.message).lower():
        return False
    raise Unsolved(
        "parameters",
        "searched",
        f"no placement was found in {time_limit:.0f} s, and the search for one is not finished; pin more degrees, or "
        "increase time_budget if it is given",
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
        """A row: low <= sum of the columns, each times its entry, <= high."""
        columns, entries = zip(*terms) if terms else ((), ())
        self._row(columns, entries, low, high)

    def compare(self, more: Sequence[int], less: Sequence[int], low: float, high: float) -> None:
        """A row: low <= sum of the columns `more` minus sum of the columns `less` <= high."""
        self._row((*more, *less), (*((1.0,) * len(more)), *((-1.0,) * len(less))), low, high)

    def _row(self, columns: Sequence[int], entries: Sequence[float], low: float, high: float) -> None:
        self.lengths.append(len(columns))
        self.columns.extend(columns)
        self.entries.extend(entries)
        self.low.append(low)
        self.high.append(high)

    def solve(self, time_limit: float) -> Any:
        """The result of scipy's milp; `time_limit`: seconds."""
        rows = np.repeat(np.arange(len(self.lengths)), self.lengths)
        entries, columns = np.asarray(self.entries, dtype=float), np.asarray(self.columns, dtype=int)
        matrix = scipy.sparse.csc_matrix((entries, (rows, columns)), shape=(len(self.low), len(self.cost)))
        cost = np.asarray(self.cost)
        scale = 1.0 / max(
            float(np.max(np.abs(cost), initial=0.0)),
            1e-12,
            # the solver's tolerances are absolute
        )
        limits = LinearConstraint(matrix, np.asarray(self.low), np.asarray(self.high))

        def run_solver(integer: Any, seconds: float, presolve: bool) -> Any:
            return milp(
                cost * scale * 1e3,
                constraints=limits,
                integrality=integer,
                bounds=Bounds(0, 1),
                options={"time_limit": seconds, "mip_rel_gap": GAP, "presolve": presolve},
            )

        # mostly the optimum of the relaxation is integral, which takes half the time; without presolve even less
        start, integer = time.perf_counter(), np.asarray(self.integer)
        relaxed = run_solver(np.zeros_like(integer), time_limit, False)
        if relaxed.status == INFEASIBLE or (relaxed.status == 0 and _is_integer(relaxed.x[integer > 0])):
            return relaxed
        return run_solver(integer, max(0.0, time_limit - (time.perf_counter() - start)), True)


def _is_integer(values: Any) -> bool:
    return bool(np.all(np.abs(values - np.round(values)) <= INTEGRALITY))


class Move(NamedTuple):
    """A collective of a conversion. `target` None: the state that the consumer wants."""

    source: State
    target: State | None
    phase: Phase
    collective: Collective


@dataclass(frozen=True)
class ConversionStep:
    """Collectives that are always performed together when a value goes from one state to another.

    Args:
        moves: the collectives.
        seconds: of one occurrence.
        key: equal for the steps of one value that its consumers share; None where each consumer does its own.
        repeated: whether the seconds are paid again when the consumer is recomputed.
    """

    moves: tuple[Move, ...]
    seconds: float
    key: Hashable
    repeated: bool = False


Route: TypeAlias = tuple[ConversionStep, ...] | None
"""The steps from one state to another; None where there is no way."""


class ProblemView(Protocol):
    """What the integer program reads of a placement problem, on one axis or several."""

    @property
    def tape(self) -> Tape:
        """The recorded run."""

    @property
    def quotient(self) -> Quotient:
        """The tape up to repetition."""

    @property
    def costs(self) -> AxisCosts:
        """Costs on the searched axes."""

    @property
    def options(self) -> Mapping[int, Sequence[Option]]:
        """Representative node -> its legal options."""

    @property
    def whole(self) -> State:
        """The replicated state."""

    def storable(self, value: int, divided: bool) -> list[State]:
        """The states in which a parameter may be stored. `divided`: sharded only."""

    def route(self, value: int, source: State, target: State) -> Route:
        """How a value is brought from one state to another."""

    def inside_one_call(self, value: int, node: int) -> bool:
        """Whether a value is produced and read by one torch function call."""

    def writes(self, node: int, position: int) -> bool:
        """Whether a node writes to this input, or is a view that is written through."""

    def kept_bytes(self, item: Saved) -> int:
        """Bytes of a saved tensor on the cluster."""

    def kept_split(self, item: Saved, option: Option) -> Hashable:
        """How a saved tensor is divided with this option of the node that saves it."""

    def slot(self, node: int, value: int | None, output: bool) -> int | None:
        """Which input or output of `node` has the storage of `value`."""


class User(NamedTuple):
    """A consumer of a conversion: input `position` of `node` in state `target`, by variable `edge`."""

    node: int
    position: int
    target: State
    edge: int


@dataclass
class Event:
    """A conversion step that may happen.

    Args:
        value: representative value that is converted.
        step: its collectives.
        count: occurrences in one training step.
        users: consumers that may need it.
        column: its variable. None: the step happens whenever a user's edge is chosen.
    """

    value: int
    step: ConversionStep
    count: int
    users: list[User] = field(default_factory=list)
    column: int | None = None

    def conversions(self, x: Any, times_run: Callable[[Sequence[User]], int]) -> Iterator[Conversion]:
        """Its collectives in the solution `x`. `times_run(users)`: forward passes of consumers in one training step."""
        users = [u for u in self.users if x[u.edge] > 0.5]
        # a column that costs nothing may be 1 without a user
        if not users or (self.column is not None and x[self.column] <= 0.5):
            return
        consumers = tuple((u.node, u.position) for u in users)
        for source, target, phase, collective in self.step.moves:
            count = self.count * (times_run(users) if phase == "forward" else 1)
            target = users[0].target if target is None else target
            yield Conversion(self.value, source, target, phase, collective, count, consumers)
