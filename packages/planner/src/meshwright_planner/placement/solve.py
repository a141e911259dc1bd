"""Solves placement problems: on one axis by one integer program.

On two axes too if it is small enough, else by alternating optimization with a lower bound.

Alternating optimization places one axis with the other fixed, until nothing improves.  It starts with the axes placed one after
the other, in both orders, so it is never worse than those.

All programs share the time limit: half of it is for the single program, the rest for the alternation and the bound.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, replace

from meshwright_dtensor.sharding.states import State
from meshwright_planner.cost.prices import AxisCosts, Collective
from meshwright_planner.placement.ilp import GAP, INFEASIBLE, MemoryTerms, Placement, Unsolved
from meshwright_planner.placement.ilp_build import Build
from meshwright_planner.placement.problem import PlacementProblem
from meshwright_planner.placement.two_axes import JointProblem

EXACT = 200_000
"""Most pairs of states on edges for which one program places both axes."""

TURNS = 8
"""Maximum number of rounds of the alternation."""

BOUND = 0.1
"""Fraction of the time of the alternation that is reserved for the bound."""


def solve(
    problem: PlacementProblem,
    memory: MemoryTerms,
    divided: frozenset[int] = frozenset(),
    time_limit: float | None = None,
    exact: int | None = None,
) -> Placement | None:
    """The best placement; None if there is none, for example within `memory.limit`.

    Args:
        problem: on one axis or on two.
        memory: price and limit of memory.
        divided: weights that must be stored sharded (see `PlacementProblem.weights`).
        time_limit: seconds for all programs together; None: the patience of the problem.
        exact: pairs up to which one program places both axes; None: EXACT.

    Raises Unsolved: the time was over before there was an answer.
    """
    limit = problem.patience if time_limit is None else time_limit
    if not isinstance(problem, JointProblem):
        return solve_program(problem, memory, divided, limit)
    return _solve_two_axes(problem, memory, divided, limit, EXACT if exact is None else exact)


def solve_program(
    problem: PlacementProblem, memory: MemoryTerms, divided: frozenset[int], time_limit: float
) -> Placement | None:
    """The best placement by one integer program; see `solve`."""
    build = Build(problem, memory, divided)
    answer = build.program.solve(max(0.0, time_limit))
    if answer.x is not None:
        return build.read(answer)
    if answer.status == INFEASIBLE or "infeasible" in str(answer.message).lower():
        return None
    raise Unsolved(
        "parameters",
        "searched",
        f"no placement was found in {time_limit:.0f} s, and the search for one is not finished; pin more degrees, or "
        "increase time_budget if it is given",
    )


def _solve_two_axes(
    problem: JointProblem, memory: MemoryTerms, divided: frozenset[int], time_limit: float, exact: int
) -> Placement | None:
    start = time.perf_counter()
    placement, late = None, None
    if count_pairs(problem) <= exact:
        try:
            placement = solve_program(problem, memory, divided, time_limit / 2)
        except Unsolved as unsolved:
            late = unsolved
        else:
            if placement is None or placement.status == "optimal":
                return placement
    turning = time_limit - (time.perf_counter() - start)
    try:
        other = in_turns(problem, memory, divided, turning * (1 - BOUND))
    except Unsolved as unsolved:
        other, late = None, unsolved
    best = min((p for p in (placement, other) if p is not None), key=lambda p: p.objective, default=None)
    if best is None:
        # a failed alternation does not prove that there is no placement
        if late is not None:
            raise late
        return None
    bound = lower_bound(problem, max(1.0, time_limit - (time.perf_counter() - start)))
    return replace(best, status="in turns", bound=bound)


def one_after_the_other(
    problem: JointProblem,
    memory: MemoryTerms,
    divided: frozenset[int] = frozenset(),
    time_limit: float = 60.0,
    first: int = 0,
) -> Placement | None:
    """Place axis `first` with the other replicated, then the other with the first fixed. Raises Unsolved: as of `solve`."""
    end = time.perf_counter() + time_limit
    unlimited = replace(memory, limit=None)
    alone = solve_program(problem.with_fixed(1 - first, None), unlimited, divided, time_limit / 2)
    if alone is None:
        return None
    return solve_program(problem.with_fixed(first, alone), memory, divided, end - time.perf_counter())


def in_turns(
    problem: JointProblem, memory: MemoryTerms, divided: frozenset[int] = frozenset(), time_limit: float = 60
) -> Placement | None:
    """The better of both orders, improved on one axis after the other until nothing changes or the time is over.

    Raises Unsolved: the time was over before there was an answer in either order.
    """
    end = time.perf_counter() + time_limit
    best, late = None, None
    for first in (0, 1):
        left = end - time.perf_counter()
        try:
            placement = one_after_the_other(problem, memory, divided, left / (3 - first), first)
        except Unsolved as unsolved:
            late = unsolved
            continue
        if placement is not None and (best is None or placement.objective < best.objective):
            best = placement
    if best is None and late is not None:
        raise late
    still = 0
    for turn in range(2 * TURNS):
        left = end - time.perf_counter()
        if best is None or still == 2 or left <= 0:
            break
        try:
            placement = solve_program(problem.with_fixed(turn % 2, best), memory, divided, left)
        except Unsolved:
            break
        better = placement is not None and placement.objective < best.objective * (1 - GAP)
        still = 0 if better else still + 1
        best = placement if better else best
    return best


def lower_bound(problem: JointProblem, time_limit: float = 60.0) -> float:
    """A lower bound of the objective: the best placement on the outer axis, with no communication on the inner one.

    Every operation has the seconds of its best row on the inner axis, and every value the size of its smallest shard there.
    """
    outer, inner = problem.legality.axes
    least = PlacementProblem(outer)
    least.pins = {value: (first,) for value, (first, _) in problem.pins.items() if first is not None}
    least.costs = _Divided(**vars(outer.costs), parts=inner.costs.degree)
    for k, options in least.options.items():
        seconds: dict[object, float] = {}
        for pair in problem.options[k]:
            key = tuple(s[0] for s in pair.ins), tuple(s[0] for s in pair.outs)  # type: ignore[index]
            seconds[key] = min(seconds.get(key, float("inf")), pair.seconds)
        paired = (o for o in options if (o.ins, o.outs) in seconds)
        least.options[k] = [replace(o, seconds=seconds[o.ins, o.outs], inner_seconds=0.0) for o in paired]
    build = Build(least, MemoryTerms(0.0, 1.0), frozenset())
    answer = build.program.solve(time_limit)
    if answer.x is None or answer.status != 0:
        counts = problem.quotient.node_count
        return sum(min(o.seconds for o in some) * counts[k] for k, some in problem.options.items())
    return build.read(answer).objective * (1 - GAP)


@dataclass(frozen=True)
class _Divided(AxisCosts):
    """Costs of collectives of values that the inner axis divides into as many parts as possible."""

    parts: int = 1

    def collective(self, collective: Collective | None) -> float:
        """Seconds of the smallest such collective."""
        if collective is None:
            return 0.0
        return super().collective(replace(collective, nbytes=collective.nbytes // self.parts))


def count_pairs(problem: JointProblem) -> int:
    """Number of pairs (produced state, wanted state) on the edges of a problem: the size of its program."""
    left: dict[int, set[State]] = defaultdict(set)
    for k in problem.quotient.nodes:
        for option in problem.options[k]:
            for ref, state in zip(problem.tape.nodes[k].outs, option.outs, strict=True):
                left[problem.quotient.value(ref.i)].add(state)
    total = 0
    for value, node, position in problem.quotient.edges:
        if problem.is_parameter(value):
            here: set[State] = set(problem.storable(value, False))
        else:
            here = left.get(value) or {problem.whole}
        total += len(here) * len({option.ins[position] for option in problem.options[node]})
    return total
