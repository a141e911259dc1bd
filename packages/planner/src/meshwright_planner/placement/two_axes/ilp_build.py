"""The integer program of two axes: that of one axis (placing/building.py) over pairs of states.

What differs are the conversions.  The runtime brings a value from pair to pair in one or two stages, each a list of
collectives that it keeps for whoever wants the same: a stage is one variable, with the cost of all its collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from meshwright_dtensor.sharding.states import State
from meshwright_planner.placement.ilp import Conversion, MemoryTerms
from meshwright_planner.placement.ilp_build import TIE, Build
from meshwright_planner.placement.solution import RESULT, along
from meshwright_planner.placement.two_axes.prices import Stage, stages

if TYPE_CHECKING:
    from meshwright_planner.placement.two_axes.problem import JointProblem


@dataclass
class _Made:
    """A stage that may be carried out, and who asks for it: (node, position, edge variable).

    By variable `column`, or where that is None whenever one of them asks.
    """

    value: int
    stage: Stage
    count: int
    seconds: float
    column: int | None = None
    users: list[tuple[int, int, int]] = field(default_factory=list)


class JointBuild(Build):
    """The program of pairs, and the placement that a solution stands for."""

    problem: JointProblem

    def __init__(self, problem: JointProblem, memory: MemoryTerms, divided: frozenset[int]) -> None:
        self.made: list[_Made] = []
        super().__init__(problem, memory, divided)

    def _stored(self, value: int) -> list[State]:
        return self.problem.storable(value, value in self.divided)

    def _conversions(self, value: int, consumers: list[tuple[int, int, tuple[int, ...]]]) -> None:
        program, whole = self.program, self.problem.whole
        produced = self.producers[value]
        shared: dict[Any, _Made] = {}
        known = len(self.made)
        # a weight is converted at each of its uses
        alone = len(consumers) == 1 or self.problem.is_parameter(value)
        for node, position, flows in consumers:
            count = len(flows)
            fixed = self.problem.inside_one_call(value, node)
            written = self.problem.writes(node, position)
            wanted: Mapping[State, list[int]] = (
                {whole: []} if node == RESULT else self._wanted(node, position)
            )
            if set(wanted) == {whole} and set(produced) == {whole}:
                continue
            leaving: dict[State, list[int]] = {source: [] for source in produced}
            arriving: dict[State, list[int]] = {target: [] for target in wanted}
            for source in produced:
                for target in wanted:
                    if source != target and (fixed or not self.problem.may_move(value, source, target)):
                        continue
                    if written and source != target:
                        continue
                    way = stages(along(source), along(target))
                    if way is None:
                        continue
                    e = program.variable(TIE * count if source != target else 0.0)
                    leaving[source].append(e)
                    arriving[target].append(e)
                    at = along(source)
                    for stage in way:
                        here, at = at, stage.target
                        if not any(True for _ in self.problem.moves(value, stage)):
                            continue
                        seconds = self.problem.seconds(value, here, stage) * count
                        made = _Made(value, stage, count, seconds)
                        if alone or not stage.kept:  # nobody shares it
                            self.made.append(made)
                        else:
                            made = shared.setdefault((source, here, stage.target, flows), made)
                        made.users.append((node, position, e))
            self._flow(node, (produced, leaving), (wanted, arriving))
        self.made += shared.values()
        for made in self.made[known:]:
            made.column = self._serve(made.seconds, made.users)

    def _chosen(self, x: Any) -> list[Conversion]:
        # what costs nothing may be chosen for nobody
        wanted = (made for made in self.made if any(x[edge] > 0.5 for _, _, edge in made.users))
        chosen = (made for made in wanted if made.column is None or x[made.column] > 0.5)
        return [c for made in chosen for c in self._collectives(made, x)]

    def _collectives(self, made: _Made, x: Any) -> Iterable[Conversion]:
        consumers = tuple((node, position) for node, position, edge in made.users if x[edge] > 0.5)
        for move, collective in self.problem.moves(made.value, made.stage):
            count = made.count * (self.times_again(consumers) if move.phase == "forward" else 1)
            yield Conversion(made.value, move.source, move.target, move.phase, collective, count, consumers)


def count_pairs(problem: JointProblem) -> int:
    """How many pairs of (state left in, state wanted in) the edges of a problem have: the size of its program."""
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
