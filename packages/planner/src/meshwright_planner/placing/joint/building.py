"""The integer program of two axes: that of one axis (placing/building.py) over pairs of states.

What differs are the conversions.  The runtime brings a value from pair to pair in one or two stages, each a list of
collectives that it keeps for whoever wants the same: a stage is one variable, with the cost of all its collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from meshwright_dtensor.states import State, States
from meshwright_planner.placing.answer import RESULT, along
from meshwright_planner.placing.building import TIE, Build
from meshwright_planner.placing.joint.pricing import Stage, stages
from meshwright_planner.placing.program import Conversion, MemoryTerms

if TYPE_CHECKING:
    from meshwright_planner.placing.joint.problem import JointProblem


@dataclass
class _Made:
    """A stage that may be carried out, and by variable `column` who asks for it: (node, position, edge variable)."""

    column: int
    value: int
    source: States
    stage: Stage
    count: int
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
        weight = self.problem.is_parameter(value)
        for node, position, flows in consumers:
            count = len(flows)
            fixed = self.problem.inside_one_call(value, node)
            wanted: Mapping[State, list[int]] = (
                {whole: []} if node == RESULT else self._wanted(node, position)
            )
            if set(wanted) == {whole} and set(produced) == {whole}:
                continue
            leaving: dict[State, list[tuple[int, float]]] = {source: [] for source in produced}
            arriving: dict[State, list[tuple[int, float]]] = {target: [] for target in wanted}
            for source in produced:
                for target in wanted:
                    if source != target and (fixed or not self.problem.may_move(value, source, target)):
                        continue
                    way = stages(along(source), along(target))
                    if way is None:
                        continue
                    e = program.variable(TIE * count if source != target else 0.0)
                    leaving[source].append((e, 1.0))
                    arriving[target].append((e, 1.0))
                    at = along(source)
                    for stage in way:
                        # what is not kept with the tensor, each consumer makes for itself
                        alone = (node, position) if weight or not stage.kept else None
                        key = (source, at, stage.target, flows, alone)
                        if key not in shared:
                            seconds = self.problem.seconds(value, stage)
                            if not seconds:
                                at = stage.target
                                continue
                            column = program.variable(seconds * count)
                            shared[key] = _Made(column, value, at, stage, count)
                        shared[key].users.append((node, position, e))
                        at = stage.target
            for source, columns in produced.items():
                program.constrain([*leaving[source], *((x, -1.0) for x in columns)], 0.0, 0.0)
            for target, columns in wanted.items():
                if node == RESULT:
                    program.constrain(arriving[target], 1.0, 1.0)
                else:
                    program.constrain([*arriving[target], *((x, -1.0) for x in columns)], 0.0, 0.0)
        for made in shared.values():
            self.made.append(made)
            edges: dict[tuple[int, int], list[int]] = defaultdict(list)
            for node, position, edge in made.users:
                edges[node, position].append(edge)
            for asked in edges.values():
                program.constrain([(made.column, 1.0), *((e, -1.0) for e in asked)], 0.0, np.inf)

    def _chosen(self, x: Any) -> list[Conversion]:
        return [c for made in self.made if x[made.column] > 0.5 for c in self._collectives(made, x)]

    def _collectives(self, made: _Made, x: Any) -> Iterable[Conversion]:
        consumers = tuple((node, position) for node, position, edge in made.users if x[edge] > 0.5)
        for move, collective in self.problem.moves(made.value, made.stage):
            yield Conversion(
                made.value, move.source, move.target, move.phase, collective, made.count, consumers
            )


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
