"""Placements on one mesh axis, found by integer programming over legal strategies.

Variables, all in [0, 1]:

- x[node, option]: the option of a representative node; binary, one per node.
- l[value, state]: how a parameter is stored; binary, one per parameter.  Inputs and buffers are replicated.
- e[edge, p, s]: the producer leaves the value in p and the consumer wants it in s.  Continuous: both marginals are
  tied to the binaries (the local polytope), so the relaxation is tight and is mostly solved at the root.
- c[value, kinds]: the conversion happens; at least every e that needs it, so that consumers share one collective.
- m[storage, split]: autograd keeps this storage, whole or sharded; at least every option that keeps it so.

Objective: seconds of compute and communication, plus a price per byte of memory.  Constraint, on demand: memory.
"""

from __future__ import annotations

import copy
import math
import time
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from meshwright_dtensor.runs import Runs
from meshwright_dtensor.states import State, forward_kind, is_shard
from meshwright_planner.costs.keeping import kept_bytes
from meshwright_planner.costs.prices import BACKWARD, Collective, backward_move, convertible, forward_move
from meshwright_planner.placing.legal import Legality, Option
from meshwright_planner.placing.marks import pinned
from meshwright_planner.placing.program import Conversion, Event, MemoryTerms, Phase, Program, User
from meshwright_planner.profile.tape import Saved, Tape

TIE = 1e-9
"""Seconds: breaks ties towards fewer conversions and replicated parameters."""

NOTICEABLE = 0.001
"""A weight with less than this part of all weights' bytes may be replicated."""

RESULT = -1
"""Stands for whoever receives the model's results, as the consumer of an edge."""


@dataclass
class Placement:
    """A solution.

    Args:
        options: representative node -> its option.
        stored: representative parameter value -> its state.
        conversions: the collectives between nodes.
        compute_seconds, communication_seconds: of one step on one rank, over all repetitions.
        saved_bytes: what autograd keeps on one rank.
        status: "optimal", or the solver's message when it stopped early with a solution.
        variables, binaries, rows: size of the program.
        seconds: time to build and solve.
        times: microbatches that the counts, seconds and bytes are of.
        again_seconds: of the compute seconds, those of forward work that runs once more in the backward pass.
        again: representative node -> the part of its copies that runs twice, where some do.
    """

    options: dict[int, Option]
    stored: dict[int, State]
    conversions: list[Conversion]
    compute_seconds: float
    communication_seconds: float
    saved_bytes: float
    status: str
    variables: int
    binaries: int
    rows: int
    seconds: float
    objective: float
    times: int = 1
    again_seconds: float = 0.0
    again: Mapping[int, float] = field(default_factory=dict)

    @property
    def forward_seconds(self) -> float:
        """Of the compute seconds, those of the forward pass: a backward takes twice as long, and what runs again."""
        return (self.compute_seconds - self.again_seconds) / (1.0 + BACKWARD)


_Consumer: TypeAlias = tuple[int, int, tuple[int, ...]]
"""(node, position among its inputs, the copies of the value that its copies read)."""


class PlacementProblem:
    """The search for placements of one tape on one axis. `pins` fixes how parameters (by name) are stored."""

    def __init__(self, legality: Legality, pins: Mapping[str, State] | None = None) -> None:
        self.legality = legality
        self.tape, self.quotient, self.costs = legality.tape, legality.quotient, legality.costs
        self.pins = pinned(legality, dict(pins or {}))
        self.options = {k: legality.options(k) for k in self.quotient.nodes}
        self._maker = {
            self.quotient.value(r.i): k for k in self.quotient.nodes for r in self.tape.nodes[k].outs
        }
        self._inner = _inner(self.tape)

    def on(self, tape: Tape) -> PlacementProblem:
        """The same problem of a tape that differs from this one in sizes, and in what autograd keeps."""
        other = copy.copy(self)
        other.tape, other.legality = tape, self.legality.on(tape)
        other._inner = _inner(tape)
        return other

    def again(self, placement: Placement) -> Placement:
        """A placement of a problem of other sizes, costed for this one."""
        counts, values = self.quotient.node_count, self.tape.values
        options = {k: self.legality.option(k, o.ins, o.outs) for k, o in placement.options.items()}
        conversions = [
            replace(c, collective=Collective(c.collective.kind, values[c.value].nbytes))
            for c in placement.conversions
        ]
        between = sum(self.costs.collective(c.collective) * c.count for c in conversions)
        found = replace(
            placement,
            options=options,
            conversions=conversions,
            compute_seconds=sum(o.seconds * counts[k] for k, o in options.items()),
            communication_seconds=between + sum(o.inner_seconds * counts[k] for k, o in options.items()),
        )
        return replace(found, saved_bytes=kept_bytes(self, found))

    def solve(
        self, memory: MemoryTerms, *, divided: frozenset[int] = frozenset(), time_limit: float = 60.0
    ) -> Placement | None:
        """The best placement, or None when there is none (`memory.limit` cannot be met, say).

        Args:
            memory: price and limit of memory.
            divided: weights that are to be stored sharded (see `weights`).
            time_limit: seconds for the solver.
        """
        start = time.perf_counter()
        build = _Build(self, memory, divided)
        answer = build.program.solve(time_limit)
        if answer.x is None:
            return None
        return build.read(answer, time.perf_counter() - start)

    def weights(self, alone: bool = False) -> frozenset[int]:
        """Parameters of two dims or more with a noticeable part of all their bytes that can be used as shards.

        `alone`: only where one operation is all of the call that reads them: nothing is converted inside of a call, so that
        what one operation could use need not suit the next (a whole LSTM is one call).
        """
        quotient, values = self.quotient, self.tape.values
        usable: dict[int, set[State]] = {}
        calls = Counter((n.call, n.call_inputs) for n in map(self.tape.nodes.__getitem__, quotient.nodes))
        for value, node, position in quotient.edges:
            reader = self.tape.nodes[node]
            if alone and calls[reader.call, reader.call_inputs] > 1:
                usable[value] = set()
                continue
            if len(values[value].shape) > 1 and self.legality.parameter_choices(value):
                wanted = {option.ins[position] for option in self.options[node]}
                ways = {s for s in self.legality.parameter_states(value) if is_shard(s)}
                usable[value] = usable.get(value, ways) & wanted
        sizes = {value: values[value].nbytes * quotient.value_count[value] for value in usable}
        total = sum(sizes.values())
        return frozenset(v for v, ways in usable.items() if ways and sizes[v] >= NOTICEABLE * total)

    def inside_one_call(self, value: int, node: int) -> bool:
        """Whether a value is made and read by one torch function call: a plan can only speak of calls."""
        maker = self._maker.get(value)
        if maker is None or node == RESULT:
            return False
        first, second = self.tape.nodes[maker], self.tape.nodes[node]
        return first.call is not None and (first.call, first.call_inputs) == (second.call, second.call_inputs)

    def stays(self, value: int) -> bool:
        """Whether a value that is stored sharded is used as it is stored.

        A tensor-parallel axis moves activations, never weights (gathering weights is what ZeRO does, on the data
        axis).  A parameter that the user placed is gathered where it must be.
        """
        name = self.tape.values[value].name or ""
        return name.startswith("param:") and self.quotient.value(value) not in self.pins

    def kept_bytes(self, item: Saved) -> int:
        """Bytes of a saved tensor on the cluster.

        Where attention is fused, it keeps one float32 per row beside its inputs and output, whatever the machine that
        the tape was recorded on would have kept.
        """
        node = self.tape.nodes[item.node]
        if item.root is None and node.name == "sdpa" and self.costs.cluster.fused_attention:
            inner = self._inner[item.node]
            rows = math.prod(self.tape.values[node.outs[0].i].shape[:-1])
            return 4 * rows if item is inner[0] else 0
        return item.nbytes

    def keeps_shard(self, item: Saved, option: Option) -> bool:
        """Whether a saved tensor of known storage is a shard, with this option of the node that keeps it."""
        states = option.outs if item.output else option.ins
        position = self.slot(item.node, item.value, item.output)
        return is_shard(states[position]) if position is not None else any(map(is_shard, states))

    def slot(self, node: int, value: int | None, output: bool) -> int | None:
        """Which input or output of `node` shares the storage of `value`."""
        refs = self.tape.nodes[node].outs if output else self.tape.nodes[node].ins
        return next((i for i, r in enumerate(refs) if r.i == value), None)

    @property
    def read_parameters(self) -> set[str]:
        """Names of the parameters that the results depend on."""
        read = {r.i for node in self.tape.nodes for r in node.ins}
        return {name for name, value in self.tape.parameters.items() if value in read}

    def replicated(self) -> Placement:
        """Everything replicated: what one rank alone does."""
        options = {k: self.options[k][0] for k in self.quotient.nodes}
        counts = self.quotient.node_count
        saved: dict[object, float] = {}
        for number, item in enumerate(self.tape.saved):
            name = "" if item.root is None else self.tape.values[item.root].name or ""
            if not name.startswith("param:"):
                key = item.root if item.root is not None else ("inner", number)
                saved[key] = max(saved.get(key, 0.0), float(self.kept_bytes(item)))
        return Placement(
            options=options,
            stored={},
            conversions=[],
            compute_seconds=sum(o.seconds * counts[k] for k, o in options.items()),
            communication_seconds=0.0,
            saved_bytes=sum(saved.values()),
            status="replicated",
            variables=0,
            binaries=0,
            rows=0,
            seconds=0.0,
            objective=0.0,
        )


def _inner(tape: Tape) -> dict[int, list[Saved]]:
    """Node -> what it keeps that the recorder never saw."""
    found: dict[int, list[Saved]] = defaultdict(list)
    for item in tape.saved:
        if item.root is None:
            found[item.node].append(item)
    return found


class _Build:
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
            self.program.constrain([(c, 1.0) for c in columns], 1.0, 1.0)

    def _leaves(self) -> None:
        produced = {self.quotient.value(r.i) for k in self.quotient.nodes for r in self.tape.nodes[k].outs}
        read = [*(value for value, _, _ in self.quotient.edges), *map(self.quotient.value, self.tape.results)]
        for value in dict.fromkeys(v for v in read if v not in produced):
            name = self.tape.values[value].name or ""
            states: list[State] = ["I"]
            if name.startswith("param:"):
                pin = self.problem.pins.get(value)
                states = self.problem.legality.parameter_states(value) if pin is None else [pin]
                if pin is None and value in self.divided:
                    states = [s for s in states if is_shard(s)]
            total = (
                self.tape.values[value].nbytes
                * self.quotient.value_count[value]
                * self.memory.parameter_factor
            )
            columns = []
            for state in states:
                nbytes = total * self.costs.share(state) if name.startswith("param:") else 0.0
                tie = 0.0 if state == "I" else TIE * (1 + int(state) + isinstance(state, Runs) / 2)
                column = self.program.variable(nbytes * self.memory.price + tie, integer=True, memory=nbytes)
                columns.append(column)
                self.producers[value][state].append(column)
            self.stored[value] = (states, columns)
            self.program.constrain([(c, 1.0) for c in columns], 1.0, 1.0)

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
        program, produced = self.program, self.producers[value]
        nbytes, grad = self.tape.values[value].nbytes, self.tape.grad[value]
        stays = self.problem.stays(value)
        shared: dict[Any, Event] = {}  # by phase, source, target kind and which of the value's copies flow

        def share(phase: Phase, kind: State, needs: Collective, user: User) -> None:
            key = (phase, source, kind, flows)
            if key not in shared:
                column = program.variable(self.costs.collective(needs) * count)
                shared[key] = Event(column, value, source, phase, needs, count)
            shared[key].users.append(user)

        for node, position, flows in consumers:
            count = len(flows)  # a conversion is made once for all readers of a value
            fixed = self.problem.inside_one_call(value, node)
            wanted: dict[State, list[int]] = {"I": []} if node == RESULT else self._wanted(node, position)
            if set(wanted) == {"I"} and set(produced) == {"I"}:
                continue
            edges: dict[tuple[State, State], int] = {}
            for source in produced:
                for target in wanted:
                    if not convertible(source, target) or (stays and source != target and is_shard(source)):
                        continue
                    if fixed and source != target:
                        continue
                    edges[source, target] = e = program.variable(TIE * count if source != target else 0.0)
                    ahead, back = forward_move(source, target, nbytes), backward_move(source, target, nbytes)
                    user = User(node, position, target, e)
                    if ahead is not None:
                        share("forward", forward_kind(target), ahead, user)
                    if back is not None and grad:
                        share("backward", target, back, user)
            for source, columns in produced.items():
                terms = [(e, 1.0) for (a, _), e in edges.items() if a == source]
                program.constrain([*terms, *((x, -1.0) for x in columns)], 0.0, 0.0)
            for target, columns in wanted.items():
                terms = [(e, 1.0) for (_, b), e in edges.items() if b == target]
                if node == RESULT:
                    program.constrain(terms, 1.0, 1.0)
                else:
                    program.constrain([*terms, *((x, -1.0) for x in columns)], 0.0, 0.0)
        for event in shared.values():
            self.events.append(event)
            consumers_of: dict[tuple[int, int], list[int]] = defaultdict(list)
            for user in event.users:
                consumers_of[user.node, user.position].append(user.edge)
            for edges_of in consumers_of.values():
                program.constrain([(event.column, 1.0), *((e, -1.0) for e in edges_of)], 0.0, np.inf)

    def _saved(self) -> None:
        """Memory of what autograd keeps: one variable per storage and per way (whole, sharded) it is kept in."""
        users: dict[tuple[int | None, bool], dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        copies: dict[int, set[int]] = defaultdict(set)  # a mask that every layer keeps is kept once
        for item in self.tape.saved:
            if item.root is not None:
                copies[self.quotient.value(item.root)].add(item.root)
        size: dict[tuple[int | None, bool], float] = {}
        for number, item in enumerate(self.tape.saved):
            node = self.quotient.node(item.node)
            if node != item.node:
                continue
            count = self.quotient.node_count[node]
            root = None if item.root is None else self.quotient.value(item.root)
            if root is None:
                for column, option in zip(self.x[node], self.problem.options[node]):
                    split = any(map(is_shard, (*option.ins, *option.outs)))
                    nbytes = self.problem.kept_bytes(item) * count * (self.costs.share(0) if split else 1.0)
                    self._price(column, nbytes)
                continue
            for column, option in zip(self.x[node], self.problem.options[node]):
                split = self.problem.keeps_shard(item, option)
                key = (root, split)
                users[key][node * 1_000_000 + number].append(column)
                nbytes = item.nbytes * len(copies[root]) * (self.costs.share(0) if split else 1.0)
                size[key] = max(size.get(key, 0.0), nbytes)
        for (root, split), by_user in users.items():
            nbytes = size[root, split]
            held = []
            if root in self.stored:  # a parameter in the state it is stored in costs nothing more
                ways, columns = self.stored[root]
                held = [c for s, c in zip(ways, columns) if is_shard(s) == split]
            column = self.program.variable(nbytes * self.memory.price, memory=nbytes)
            self.kept[column] = nbytes
            for chosen in by_user.values():
                terms = [(column, 1.0), *((c, -1.0) for c in chosen), *((c, 1.0) for c in held)]
                self.program.constrain(terms, 0.0, np.inf)

    def _price(self, column: int, nbytes: float) -> None:
        self.program.cost[column] += nbytes * self.memory.price
        self.program.memory[column] += nbytes
        self.kept[column] = self.kept.get(column, 0.0) + nbytes

    def read(self, answer: Any, seconds: float) -> Placement:
        """The placement that a solution stands for."""
        x = answer.x

        def best(columns: list[int]) -> int:
            return max(range(len(columns)), key=lambda i: (x[columns[i]], -i))

        options = {k: self.problem.options[k][best(columns)] for k, columns in self.x.items()}
        stored = {v: states[best(columns)] for v, (states, columns) in self.stored.items()}
        conversions = [event.chosen(x) for event in self.events if x[event.column] > 0.5]
        counts = self.quotient.node_count
        inner = sum(o.inner_seconds * counts[k] for k, o in options.items())
        between = sum(self.costs.collective(c.collective) * c.count for c in conversions)
        return Placement(
            options=options,
            stored=stored,
            conversions=conversions,
            compute_seconds=sum(o.seconds * counts[k] for k, o in options.items()),
            communication_seconds=between + inner,
            saved_bytes=float(sum(b for column, b in self.kept.items() if x[column] > 0.5)),
            status="optimal" if answer.status == 0 else str(answer.message),
            variables=len(self.program.cost),
            binaries=sum(self.program.integer),
            rows=len(self.program.low),
            seconds=seconds,
            objective=float(np.dot(self.program.cost, x)),
        )
