"""The integer program of a placement problem.

Variables, all in [0, 1]:

- x[node, option]: the option of a representative node; binary, one per node.
- l[value, state]: how a parameter is stored; binary, one per parameter.  Inputs and buffers are replicated.
- e[edge, p, s]: the producer leaves the value in p and the consumer wants it in s.  Continuous: both marginals are
  tied to the binaries (the local polytope), so the relaxation is tight and is mostly solved at the root.
- c[value, kinds]: the conversion happens; at least every e that needs it, so that consumers share one collective.  One that a
  single consumer may need is a price of its e.
- m[storage, split]: autograd keeps this storage, whole or sharded; at least every option that keeps it so.

Objective: seconds of compute and communication, plus a price per byte of memory.  Constraint, on demand: memory.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from meshwright_dtensor.sharding.intervals import IntervalShard
from meshwright_dtensor.sharding.states import State, forward_kind, is_shard
from meshwright_dtensor.strategy import CollectiveKind
from meshwright_planner.cost.prices import Collective, backward_move, convertible, forward_move
from meshwright_planner.placement.ilp import Conversion, Event, MemoryTerms, Phase, Program, User
from meshwright_planner.placement.saved_bytes import SavedPlaces
from meshwright_planner.placement.solution import RESULT, Placement, along, seconds_of

if TYPE_CHECKING:
    from meshwright_planner.placement.problem import PlacementProblem

TIE = 1e-9
"""Seconds: breaks ties towards fewer conversions and replicated parameters."""

_Consumer: TypeAlias = tuple[int, int, tuple[int, ...]]
"""(node, position among its inputs, the copies of the value that its copies read)."""


_End: TypeAlias = tuple[Mapping[State, Sequence[int]], Mapping[State, Sequence[int]]]
"""Of one end of edges: state -> the variables of which one says that it is that state; state -> those of the edges there."""

_Way: TypeAlias = tuple[State, CollectiveKind | None, CollectiveKind | None]
"""Kind of a target in the forward pass, and what both passes of a conversion to it communicate."""


class _Ways(dict[tuple[State, State], _Way | None]):
    """How a value is brought from one state to another; None where it cannot be."""

    def __missing__(self, pair: tuple[State, State]) -> _Way | None:
        source, target = pair
        way: _Way | None = None
        if convertible(source, target):
            both = forward_move(source, target, 0), backward_move(source, target, 0)
            ahead, back = (None if one is None else one.kind for one in both)
            way = forward_kind(target), ahead, back
        self[pair] = way
        return way


class Build:
    """The program: columns and rows, and the placement that a solution stands for."""

    def __init__(self, problem: PlacementProblem, memory: MemoryTerms, divided: frozenset[int]) -> None:
        self.problem, self.memory, self.divided = problem, memory, divided
        self.tape, self.quotient, self.costs = problem.tape, problem.quotient, problem.costs
        self.program = Program()
        self.x: dict[int, list[int]] = {}
        self.stored: dict[int, tuple[list[State], list[int]]] = {}
        self.producers: dict[int, dict[State, list[int]]] = defaultdict(lambda: defaultdict(list))
        self.events: list[Event] = []
        self.kept: dict[int, float] = {}
        self._ways = _Ways()
        self._nodes()
        self._leaves()
        self._edges()
        self._saved()
        if memory.limit is not None:
            terms = [(j, b) for j, b in enumerate(self.program.memory) if b]
            scale = 1.0 / max(memory.limit, 1.0)
            self.program.constrain([(j, b * scale) for j, b in terms], 0.0, 1.0)

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
        produced = {self.quotient.value(r.i) for k in self.quotient.nodes for r in self.tape.nodes[k].outs}
        read = [*(value for value, _, _ in self.quotient.edges), *map(self.quotient.value, self.tape.results)]
        for value in dict.fromkeys(v for v in read if v not in produced):
            name = self.tape.values[value].name or ""
            states = self._stored(value) if name.startswith("param:") else [self.problem.whole]
            total = (
                self.tape.values[value].nbytes
                * self.quotient.value_count[value]
                * self.memory.parameter_factor
            )
            columns = []
            for state in states:
                nbytes = total * self.costs.share(state) if name.startswith("param:") else 0.0
                tie = sum(
                    TIE * (1 + int(s) + isinstance(s, IntervalShard) / 2) for s in along(state) if s != "I"
                )
                column = self.program.variable(nbytes * self.memory.price + tie, integer=True, memory=nbytes)
                columns.append(column)
                self.producers[value][state].append(column)
            self.stored[value] = (states, columns)
            self.program.compare(columns, (), 1.0, 1.0)

    def _stored(self, value: int) -> list[State]:
        """The states in which a parameter may be stored."""
        pin = self.problem.pins.get(value)
        states = self.problem.legality.parameter_states(value) if pin is None else [pin]
        return [s for s in states if is_shard(s)] if pin is None and value in self.divided else states

    def _edges(self) -> None:
        by_value: dict[int, list[_Consumer]] = defaultdict(list)
        for (value, node, position), flows in self.quotient.edges.items():
            by_value[value].append((node, position, flows))
        for result in self.tape.results:
            by_value[self.quotient.value(result)].append((RESULT, 0, (result,)))
        for value, consumers in by_value.items():
            self._conversions(value, consumers)

    def _wanted(self, node: int, position: int) -> dict[State, list[int]]:
        """State -> columns of the options of `node` that want input `position` in it."""
        wanted: dict[State, list[int]] = defaultdict(list)
        for column, option in zip(self.x[node], self.problem.options[node]):
            wanted[option.ins[position]].append(column)
        return wanted

    def _conversions(self, value: int, consumers: list[_Consumer]) -> None:
        program, produced, ways = self.program, self.producers[value], self._ways
        nbytes, grad = self.tape.values[value].nbytes, self.tape.grad[value]
        stays = self.problem.stays(value)
        kinds: dict[CollectiveKind, tuple[Collective, float]] = {}
        numbers: dict[tuple[int, ...], int] = {}  # of the value's copies that flow
        shared: dict[
            tuple[Phase, State, State, int], Event
        ] = {}  # by source, target kind and which copies flow

        def share(key: tuple[Phase, State, State, int], kind: CollectiveKind, user: User) -> None:
            event = shared.get(key)
            if event is None:
                if kind not in kinds:
                    needs = Collective(kind, nbytes)
                    kinds[kind] = needs, self.costs.collective(needs)
                event = shared[key] = Event(value, key[1], key[0], kinds[kind][0], count)
            event.users.append(user)

        for node, position, flows in consumers:
            count = len(flows)  # a conversion is made once for all readers of a value
            flow = numbers.setdefault(flows, len(numbers))
            fixed = self.problem.inside_one_call(value, node)
            written = self.problem.writes(node, position)
            wanted: dict[State, list[int]] = {"I": []} if node == RESULT else self._wanted(node, position)
            if set(wanted) == {"I"} and set(produced) == {"I"}:
                continue
            leaving: dict[State, list[int]] = {source: [] for source in produced}
            arriving: dict[State, list[int]] = {target: [] for target in wanted}
            for source, left in leaving.items():
                stuck = fixed or (stays and is_shard(source))
                for target, arrived in arriving.items():
                    same = source == target
                    if (stuck and not same) or (written and not same):
                        continue
                    way = ways[source, target]
                    if way is None:
                        continue
                    e = program.variable(0.0 if same else TIE * count)
                    left.append(e)
                    arrived.append(e)
                    kind, ahead, back = way
                    if ahead is None and (back is None or not grad):
                        continue
                    user = User(node, position, target, e)
                    if ahead is not None:
                        share(("forward", source, kind, flow), ahead, user)
                    if back is not None and grad:
                        share(("backward", source, target, flow), back, user)
            self._flow(node, (produced, leaving), (wanted, arriving))
        for event in shared.values():
            self.events.append(event)
            seconds = kinds[event.collective.kind][1] * event.count
            if event.phase == "forward":
                seconds *= self.times_again((user.node, user.position) for user in event.users)
            event.column = self._serve(
                seconds, [(user.node, user.position, user.edge) for user in event.users]
            )

    def _flow(self, node: int, out: _End, into: _End) -> None:
        """A value leaves in the state that it is in, and arrives in the one that `node` wants."""
        (produced, leaving), (wanted, arriving) = out, into
        for source, columns in produced.items():
            self.program.compare(leaving[source], columns, 0.0, 0.0)
        once = 1.0 if node == RESULT else 0.0
        for target, columns in wanted.items():
            self.program.compare(arriving[target], columns, once, once)

    def _serve(self, seconds: float, users: Sequence[tuple[int, int, int]]) -> int | None:
        """What is done for several is done once, where one of them asks: (node, position, edge variable).

        Returns the variable of it; None where it is for one alone, of whose edges it is a price.
        """
        node, position, _ = users[0]
        if all(user[0] == node and user[1] == position for user in users):
            for _, _, edge in users:
                self.program.cost[edge] += seconds
            return None
        column = self.program.variable(seconds)
        edges: dict[tuple[int, int], list[int]] = defaultdict(list)
        for node, position, edge in users:
            edges[node, position].append(edge)
        for asked in edges.values():
            self.program.compare((column,), asked, 0.0, np.inf)
        return column

    def _saved(self) -> None:
        """Memory of what autograd keeps: one variable per storage and per way (whole, sharded) it is kept in."""
        users: dict[tuple[int | None, Hashable], dict[int, list[int]]] = defaultdict(
            lambda: defaultdict(list)
        )
        places = SavedPlaces.of(self.problem)  # a mask that every layer keeps is kept once
        size: dict[tuple[int | None, Hashable], float] = {}
        for number, node in places.representative:
            item, root = self.tape.saved[number], self.tape.saved[number].root
            count = self.quotient.node_count[node]
            if root is None:
                for column, option in zip(self.x[node], self.problem.options[node]):
                    part = self.costs.part(self.costs.split((*option.ins, *option.outs)))
                    nbytes = self.problem.kept_bytes(item) * count * part
                    self._price(column, nbytes)
                continue
            for column, option in zip(self.x[node], self.problem.options[node]):
                split = self.problem.kept_split(item, option)
                key = (root, split)
                users[key][node * 1_000_000 + number].append(column)
                nbytes = item.nbytes * places.copies[root] * self.costs.part(split)
                size[key] = max(size.get(key, 0.0), nbytes)
        for (root, split), by_user in users.items():
            nbytes = size[root, split]
            held = []
            own = None if root is None else self.quotient.value(root)
            # a parameter in the state it is stored in costs nothing more; an input that is kept does
            if own in self.stored and (self.tape.values[own].name or "").startswith("param:"):
                ways, columns = self.stored[own]
                held = [c for s, c in zip(ways, columns) if self.costs.split((s,)) == split]
            column = self.program.variable(nbytes * self.memory.price, memory=nbytes)
            self.kept[column] = nbytes
            for chosen in by_user.values():
                self.program.compare([column, *held], chosen, 0.0, np.inf)

    def _price(self, column: int, nbytes: float) -> None:
        self.program.cost[column] += nbytes * self.memory.price
        self.program.memory[column] += nbytes
        self.kept[column] = self.kept.get(column, 0.0) + nbytes

    def _chosen(self, x: Any) -> list[Conversion]:
        """The collectives of a solution."""
        # what costs nothing may be chosen for nobody
        wanted = (event for event in self.events if any(x[user.edge] > 0.5 for user in event.users))
        found = [event.chosen(x) for event in wanted if event.column is None or x[event.column] > 0.5]
        return [
            replace(c, count=c.count * self.times_again(c.consumers)) if c.phase == "forward" else c
            for c in found
        ]

    def times_again(self, consumers: Iterable[tuple[int, int]]) -> int:
        """How often these inputs (node, position) are brought where they are wanted, in what runs again too."""
        return 1 + max((self.tape.again[node] for node, _ in consumers if node != RESULT), default=0)

    def read(self, answer: Any, seconds: float) -> Placement:
        """The placement that a solution stands for."""
        x = answer.x

        def best(columns: list[int]) -> int:
            return max(range(len(columns)), key=lambda i: (x[columns[i]], -i))

        options = {k: self.problem.options[k][best(columns)] for k, columns in self.x.items()}
        stored = {v: states[best(columns)] for v, (states, columns) in self.stored.items()}
        conversions = self._chosen(x)
        counts = self.quotient.node_count
        inner = sum(o.inner_seconds * counts[k] for k, o in options.items())
        between = sum(self.costs.collective(c.collective) * c.count for c in conversions)
        objective = float(np.dot(self.program.cost, x))
        compute, forward = seconds_of(options, counts)
        early = answer.status != 0  # the solver's own bound says how far from the best it stopped
        return Placement(
            options=options,
            stored=stored,
            conversions=conversions,
            compute_seconds=compute,
            forward_seconds=forward,
            communication_seconds=between + inner,
            saved_bytes=float(sum(b for column, b in self.kept.items() if x[column] > 0.5)),
            status="optimal" if answer.status == 0 else str(answer.message),
            variables=len(self.program.cost),
            binaries=sum(self.program.integer),
            rows=len(self.program.low),
            seconds=seconds,
            objective=objective,
            bound=objective * (1.0 - min(1.0, answer.mip_gap)) if early else None,
        )
