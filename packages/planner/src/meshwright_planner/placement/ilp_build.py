"""The integer program of a placement problem, on any number of mesh axes.

Variables, all in [0, 1]:

- x[node, option]: the option of a representative node; binary, one per node.
- l[value, state]: how a parameter is stored; binary, one per parameter.  Inputs and buffers are replicated.
- e[edge, p, s]: the producer leaves the value in p and the consumer wants it in s.  Continuous: both marginals are
  tied to the binaries (the local polytope), so the relaxation is tight and is mostly solved at the root.
- c[value, step]: a step of a conversion happens; at least every e that needs it, so that consumers share it.  A step that only
  one consumer may need is a price of its e.
- m[storage, split]: autograd saves this storage, whole or sharded; at least every option that saves it so.

Objective: seconds of compute and communication, plus a price per byte of memory.  Constraint, on demand: memory.

On one axis a state is a State, on several a tuple with one per axis.  The problem says which steps lead from one state to
another (`PlacementProblem.route`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State
from meshwright_planner.cost.prices import along
from meshwright_planner.placement.ilp import Conversion, ConversionStep, MemoryTerms, Program, Route
from meshwright_planner.placement.problem import RESULT, Placement, PlacementProblem

TIE = 1e-9
"""Seconds: breaks ties towards fewer conversions and replicated parameters."""

_Consumer: TypeAlias = tuple[int, int, tuple[int, ...]]
"""(node, position among its inputs, the copies of the value that copies of the node read)."""


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
        count: occurrences in one training step.
        users: consumers that may need it.
        column: its variable. None: the step happens whenever a user's edge is chosen.
    """

    value: int
    step: ConversionStep
    count: int
    users: list[User] = field(default_factory=list)
    column: int | None = None


class Build:
    """Builds the program, and reads the placement of a solution."""

    def __init__(self, problem: PlacementProblem, memory: MemoryTerms, divided: frozenset[int]) -> None:
        self.problem, self.memory, self.divided = problem, memory, divided
        self.tape, self.quotient, self.costs = problem.tape, problem.quotient, problem.costs
        self.program = Program()
        self.x: dict[int, list[int]] = {}
        self.stored: dict[int, tuple[list[State], list[int]]] = {}
        self.producers: dict[int, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.events: list[Event] = []
        self.kept: dict[int, float] = {}
        self._nodes()
        self._leaves()
        by_value: dict[int, list[_Consumer]] = defaultdict(list)
        for (value, node, position), flows in self.quotient.edges.items():
            by_value[value].append((node, position, flows))
        for result in self.tape.results:
            by_value[self.quotient.value(result)].append((RESULT, 0, (result,)))
        for value, consumers in by_value.items():
            self._conversions(value, consumers)
        self._saved()
        if memory.limit is not None:
            scale = 1.0 / max(memory.limit, 1.0)
            terms = [(column, nbytes * scale) for column, nbytes in enumerate(self.program.memory) if nbytes]
            self.program.constrain(terms, 0.0, 1.0)

    def _nodes(self) -> None:
        for k in self.quotient.nodes:
            count, node = self.quotient.node_count[k], self.tape.nodes[k]
            columns = []
            for option in self.problem.options[k]:
                column = self.program.variable((option.seconds + option.inner_seconds) * count, integer=True)
                columns.append(column)
                for ref, state in zip(node.outs, option.outs):
                    self.producers[self.quotient.value(ref.i)][state].append(column)
            self.x[k] = columns
            self.program.compare(columns, (), 1.0, 1.0)

    def _leaves(self) -> None:
        problem, quotient, tape = self.problem, self.quotient, self.tape
        produced = {quotient.value(r.i) for k in quotient.nodes for r in tape.nodes[k].outs}
        read = [*(value for value, _, _ in quotient.edges), *map(quotient.value, tape.results)]
        for value in dict.fromkeys(v for v in read if v not in produced):
            is_parameter = problem.is_parameter(value)
            states = problem.storable(value, value in self.divided) if is_parameter else [problem.whole]
            nbytes_once = tape.values[value].nbytes * quotient.value_count[value]
            total = nbytes_once * self.memory.parameter_factor
            columns = []
            for state in states:
                nbytes = total * self.costs.share(state) if is_parameter else 0.0
                shards = [s for s in along(state) if s != "I"]
                tie = sum(TIE * (1 + int(s) + isinstance(s, IntervalShard) / 2) for s in shards)
                column = self.program.variable(nbytes * self.memory.price + tie, integer=True, memory=nbytes)
                columns.append(column)
                self.producers[value][state].append(column)
            self.stored[value] = (states, columns)
            self.program.compare(columns, (), 1.0, 1.0)

    def _conversions(self, value: int, consumers: list[_Consumer]) -> None:
        """The edges from a value to its consumers, and the conversion steps that they need."""
        whole, produced = self.problem.whole, self.producers[value]
        # the steps from one state to another, computed once
        routes = cache(partial(self.problem.route, value))
        flow_numbers: dict[tuple[int, ...], int] = {}
        shared: dict[tuple[Hashable, int], Event] = {}
        first = len(self.events)
        for node, position, flows in consumers:
            # state -> columns of the options that want it
            wanted: dict[State, list[int]] = {whole: []} if node == RESULT else defaultdict(list)
            if node != RESULT:
                for column, option in zip(self.x[node], self.problem.options[node]):
                    wanted[option.ins[position]].append(column)
            if set(wanted) == {whole} and set(produced) == {whole}:
                continue
            # a conversion is done once for all consumers that read the same copies of the value
            flow = flow_numbers.setdefault(flows, len(flow_numbers))
            for user, route in self._edges_to(value, (node, position), wanted, len(flows), routes):
                for step in route:
                    private = step.key is None or len(consumers) == 1
                    event = None if private else shared.get((step.key, flow))
                    if event is None:
                        event = Event(value, step, len(flows))
                        if private:
                            self.events.append(event)
                        else:
                            shared[step.key, flow] = event
                    event.users.append(user)
        self.events += shared.values()
        for event in self.events[first:]:
            seconds = event.step.seconds * event.count
            if event.step.repeated:
                seconds *= self.times_run(event.users)
            event.column = self._serve(seconds, event.users)

    def _edges_to(
        self,
        value: int,
        consumer: tuple[int, int],
        wanted: Mapping[State, Sequence[int]],
        count: int,
        route_of: Callable[[State, State], Route],
    ) -> list[tuple[User, tuple[ConversionStep, ...]]]:
        """The edge variables from the producer of a value to one input of a node, each with its steps."""
        produced, (node, position) = self.producers[value], consumer
        rigid = self.problem.inside_one_call(value, node) or self.problem.writes(node, position)
        edges: list[tuple[User, tuple[ConversionStep, ...]]] = []
        leaving: dict[State, list[int]] = {source: [] for source in produced}
        arriving: dict[State, list[int]] = {target: [] for target in wanted}
        for source, left in leaving.items():
            for target, arrived in arriving.items():
                same = source == target
                route = None if rigid and not same else route_of(source, target)
                if route is None:
                    continue
                edge = self.program.variable(0.0 if same else TIE * count)
                left.append(edge)
                arrived.append(edge)
                if route:
                    edges.append((User(node, position, target, edge), route))
        for source, produced_so in produced.items():
            self.program.compare(leaving[source], produced_so, 0.0, 0.0)
        once = 1.0 if node == RESULT else 0.0
        for target, wanted_so in wanted.items():
            self.program.compare(arriving[target], wanted_so, once, once)
        return edges

    def _serve(self, seconds: float, users: Sequence[User]) -> int | None:
        """The variable of a step that several consumers share, 1 where one needs it; None where it is a price of one's edges."""
        if all(user[:2] == users[0][:2] for user in users):
            for user in users:
                self.program.cost[user.edge] += seconds
            return None
        column = self.program.variable(seconds)
        edges: dict[tuple[int, int], list[int]] = defaultdict(list)
        for user in users:
            edges[user.node, user.position].append(user.edge)
        for needed in edges.values():
            self.program.compare((column,), needed, 0.0, np.inf)
        return column

    def _saved(self) -> None:
        """Memory of saved tensors: one variable per storage and per way (whole, sharded) in which it is saved."""
        uses: dict[tuple[int | None, Hashable], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        # a mask that every layer saves counts once
        places = self.problem.saved.places
        size: dict[tuple[int | None, Hashable], float] = {}
        for number, node in places.representative:
            item, root = self.tape.saved[number], self.tape.saved[number].root
            count = self.quotient.node_count[node]
            if root is None:
                for column, option in zip(self.x[node], self.problem.options[node]):
                    part = self.costs.part(self.costs.split((*option.ins, *option.outs)))
                    nbytes = self.problem.saved.nbytes(item) * count * part
                    self.program.cost[column] += nbytes * self.memory.price
                    self.program.memory[column] += nbytes
                    self.kept[column] = self.kept.get(column, 0.0) + nbytes
                continue
            for column, option in zip(self.x[node], self.problem.options[node]):
                split = self.problem.saved.split(item, option)
                key = (root, split)
                uses[key][node * 1_000_000 + number].append(column)
                nbytes = item.nbytes * places.copies[root] * self.costs.part(split)
                size[key] = max(size.get(key, 0.0), nbytes)
        for (root, split), by_user in uses.items():
            nbytes = size[root, split]
            held = []
            stored_value = None if root is None else self.quotient.value(root)
            # a saved parameter in its stored state costs nothing more; a saved input does
            if stored_value in self.stored and self.problem.is_parameter(stored_value):
                ways, columns = self.stored[stored_value]
                held = [c for s, c in zip(ways, columns) if self.costs.split((s,)) == split]
            column = self.program.variable(nbytes * self.memory.price, memory=nbytes)
            self.kept[column] = nbytes
            for chosen in by_user.values():
                self.program.compare([column, *held], chosen, 0.0, np.inf)

    def times_run(self, users: Iterable[User]) -> int:
        """How often the inputs of these consumers are converted forward in a training step, recomputation included."""
        return 1 + max((self.tape.again[user.node] for user in users if user.node != RESULT), default=0)

    def _performed(self, event: Event, x: Any) -> Iterator[Conversion]:
        """The collectives of a step in the solution `x`."""
        users = [u for u in event.users if x[u.edge] > 0.5]
        # a column that costs nothing may be 1 without a user
        if not users or (event.column is not None and x[event.column] <= 0.5):
            return
        consumers = tuple((u.node, u.position) for u in users)
        for source, target, phase, collective in event.step.moves:
            count = event.count * (self.times_run(users) if phase == "forward" else 1)
            target = users[0].target if target is None else target
            yield Conversion(event.value, source, target, phase, collective, count, consumers)

    def read(self, answer: Any) -> Placement:
        """The placement of a solution."""
        x = answer.x

        def best(columns: list[int]) -> int:
            return max(range(len(columns)), key=lambda i: (x[columns[i]], -i))

        options = {k: self.problem.options[k][best(columns)] for k, columns in self.x.items()}
        stored = {v: states[best(columns)] for v, (states, columns) in self.stored.items()}
        conversions = [c for event in self.events for c in self._performed(event, x)]
        objective = float(np.dot(self.program.cost, x))
        # the solver stopped at a known distance from the optimum
        early = answer.status != 0
        placement = Placement(
            options,
            stored,
            conversions,
            saved_bytes=float(sum(b for column, b in self.kept.items() if x[column] > 0.5)),
            status="optimal" if answer.status == 0 else str(answer.message),
            objective=objective,
            bound=objective * (1.0 - min(1.0, answer.mip_gap)) if early else None,
        )
        compute, forward, communication = self.problem.seconds(placement)
        placement.compute_seconds, placement.forward_seconds = compute, forward
        placement.communication_seconds = communication
        return placement
