"""The integer program of a placement problem: columns, rows, solver, and its solution, a placement."""

from __future__ import annotations

import itertools
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import scipy.sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from meshwright_dtensor.errors import PlanError
from meshwright_dtensor.sharding.states import State
from meshwright_planner.cost.prices import Collective
from meshwright_planner.placement.legal_rows import Option

Phase: TypeAlias = Literal["forward", "backward"]

GAP = 1e-4
"""Largest relative distance between a solution that the solver calls optimal and the optimum."""

INTEGRALITY = 1e-6
"""Largest distance of a column of a solution from an integer."""

INFEASIBLE = 2
"""Status of scipy's milp for a program without a solution."""

RESULT = -1
"""The consumer of the model's results, as the node of an edge."""


@dataclass(frozen=True)
class Conversion:
    """A collective between a producer and its consumers.

    Args:
        value: representative value.
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


@dataclass
class Placement:
    """A solution.

    Args:
        options: representative node -> its option.
        stored: representative parameter value -> its state.
        conversions: the collectives between nodes.
        compute_seconds, communication_seconds: of one step on one rank, over all repetitions.
        forward_seconds: of the compute seconds, those of the forward pass.
        saved_bytes: bytes that autograd saves on one rank.
        status: "optimal", or the solver's message when it stopped early with a solution.
        times: number of microbatches in the counts, seconds and bytes.
        again: representative node -> the fraction of its copies that is recomputed.
        bound: lower bound of the objective, if this placement may not be optimal.
    """

    options: dict[int, Option]
    stored: dict[int, State] = field(default_factory=dict)
    conversions: list[Conversion] = field(default_factory=list)
    compute_seconds: float = 0.0
    forward_seconds: float = 0.0
    communication_seconds: float = 0.0
    saved_bytes: float = 0.0
    status: str = "optimal"
    objective: float = 0.0
    times: int = 1
    again: Mapping[int, float] = field(default_factory=dict)
    bound: float | None = None


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


@dataclass
class Program:
    """Columns and rows of the integer program as they are added."""

    cost: list[float] = field(default_factory=list)
    integer: list[int] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)
    rows: list[tuple[Sequence[int], Sequence[float], float, float]] = field(default_factory=list)

    def variable(self, cost: float, integer: bool = False, memory: float = 0.0) -> int:
        self.cost.append(cost)
        self.integer.append(int(integer))
        self.memory.append(memory)
        return len(self.cost) - 1

    def constrain(self, terms: Sequence[tuple[int, float]], low: float, high: float) -> None:
        """A row: low <= sum of the columns, each times its entry, <= high."""
        columns, entries = zip(*terms) if terms else ((), ())
        self.rows.append((columns, entries, low, high))

    def compare(self, more: Sequence[int], less: Sequence[int], low: float, high: float) -> None:
        """A row: low <= sum of the columns `more` minus sum of the columns `less` <= high."""
        self.rows.append(((*more, *less), (1.0,) * len(more) + (-1.0,) * len(less), low, high))

    def solve(self, time_limit: float) -> Any:
        """The result of scipy's milp; `time_limit`: seconds."""
        columns, entries, low, high = zip(*self.rows)
        rows = np.repeat(np.arange(len(columns)), [len(row) for row in columns])
        places = rows, np.fromiter(itertools.chain.from_iterable(columns), int)
        values = np.fromiter(itertools.chain.from_iterable(entries), float)
        matrix = scipy.sparse.csc_matrix((values, places), shape=(len(columns), len(self.cost)))
        cost = np.asarray(self.cost)
        # the solver's tolerances are absolute
        scaled = cost * (1.0 / max(float(np.max(np.abs(cost), initial=0.0)), 1e-12)) * 1e3
        limits = LinearConstraint(matrix, np.asarray(low), np.asarray(high))

        def run_solver(integer: Any, seconds: float, presolve: bool) -> Any:
            options = {"time_limit": seconds, "mip_rel_gap": GAP, "presolve": presolve}
            return milp(scaled, constraints=limits, integrality=integer, bounds=Bounds(0, 1), options=options)

        # mostly the optimum of the relaxation is integral, which takes half the time; without presolve even less
        start, integer = time.perf_counter(), np.asarray(self.integer)
        relaxed = run_solver(np.zeros_like(integer), time_limit, False)
        if relaxed.status == INFEASIBLE:
            return relaxed
        if relaxed.status == 0:
            binaries = relaxed.x[integer > 0]
            if np.all(np.abs(binaries - np.round(binaries)) <= INTEGRALITY):
                return relaxed
        return run_solver(integer, max(0.0, time_limit - (time.perf_counter() - start)), True)


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
