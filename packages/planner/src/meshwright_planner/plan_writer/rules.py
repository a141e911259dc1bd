"""The rules of a plan for a placement: parameter rules, activation rules, planned collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from torch import nn

from meshwright_dtensor.plan import ActivationRule, ParameterRule, PlannedCollective
from meshwright_dtensor.sharding.states import State, States, format_state, is_shard
from meshwright_dtensor.trace.graph import Call, Node
from meshwright_planner.cost.prices import along
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.placement.problem import RESULT, Placement, PlacementProblem
from meshwright_planner.plan_writer.patterns import Collapser
from meshwright_planner.trace.quotient import carried

Row: TypeAlias = tuple[State | None, ...]
"""Target states of tensors; None leaves a state to the runtime."""

Target: TypeAlias = tuple[Row, Row | None]
"""Those of the inputs and of the outputs of a call."""


class Writer:
    """Writes one placement on the searched axes.

    Args:
        problem, placement: the placement problem and its solution.
        axes: the searched axes, outermost first; there may be none.
        placed: parameter name -> mesh axis -> state, of parameters that strategies place themselves.
        strategy_modules: names of modules that strategies run themselves; their calls get no rules.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        placement: Placement,
        axes: Sequence[str],
        placed: Mapping[str, Mapping[str, str]] | None = None,
        strategy_modules: Iterable[str] = (),
    ) -> None:
        self.problem, self.placement, self.axes = problem, placement, tuple(axes)
        self.placed = dict(placed or {})
        self.strategy_modules = tuple(f"{name}." for name in strategy_modules)
        self.tape, self.quotient = problem.tape, problem.quotient
        self.collapser = Collapser(self.quotient.groups)
        self._made: dict[int, State] = {}
        for index, node in enumerate(self.tape.nodes):
            for ref, state in zip(node.outs, self._option(index).outs):
                self._made[ref.i] = state

    def _option(self, index: int) -> Option:
        return self.placement.options[self.quotient.node(index)]

    def _state(self, value: int) -> State:
        """The state in which a value is produced or stored."""
        if value in self._made:
            return self._made[value]
        return self.placement.stored.get(self.quotient.value(value), self.problem.whole)

    def splits_sequence(self) -> bool:
        """Whether a tensor between repeated blocks is split along the sequence."""
        values = carried(self.tape, self.quotient)
        return any(self.problem.legality.splits_sequence(v, self._state(v)) for v in values)

    def parameters(self, model: nn.Module) -> list[ParameterRule]:
        """Rules for every sharded parameter, by all names of tied ones."""
        first = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        wanted: dict[str, tuple[tuple[str, str], ...]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            value, state = self.tape.parameters.get(first[id(p)]), self.problem.whole
            if value is not None:
                state = self.placement.stored.get(self.quotient.value(value), state)
            states = {a: format_state(s) for a, s in zip(self.axes, along(state)) if s != "I"}
            wanted[name] = tuple(sorted((states | dict(self.placed.get(first[id(p)], {}))).items()))
        rules = self.collapser.collapse(wanted)
        return [ParameterRule(pattern=name, placement=dict(states)) for name, states, _ in rules if states]

    def activations(self) -> list[ActivationRule]:
        """Rules for calls with a converted input, or with an output state that the runtime would not derive."""
        rows: dict[tuple[str, int], dict[str, dict[int, Target]]] = defaultdict(lambda: defaultdict(dict))
        needed: set[Call] = set()
        for call, nodes in self._calls():
            target, necessary = self._target(nodes)
            by_forward = rows[call.function, call.occurrence][call.module]
            if necessary and by_forward.get(call.forward, target) == target:
                needed.add(call)
            by_forward.setdefault(call.forward, target)
        rules = []
        for (function, occurrence), by_module in rows.items():
            for forward, targets in _by_forward(by_module):
                forwards = {m: by_module[m] if forward is None else [forward] for m in targets}
                calls = (Call(m, function, occurrence, n) for m, numbers in forwards.items() for n in numbers)
                ruled = {call.module for call in calls if call in needed}
                if not ruled:
                    continue
                for pattern, (inputs, outputs), modules in self.collapser.collapse(targets):
                    if not ruled.isdisjoint(modules):
                        rules.append(
                            ActivationRule(
                                module=pattern,
                                function=function,
                                occurrence=occurrence,
                                forward=forward,
                                inputs=self._texts(inputs),
                                outputs=None if outputs is None else self._texts(outputs),
                            )
                        )
        return rules

    def _texts(self, row: Row) -> tuple[dict[str, str] | None, ...]:
        return tuple(
            None
            if state is None
            else {axis: format_state(s) for axis, s in zip(self.axes, along(state), strict=True)}
            for state in row
        )

    def _calls(self) -> Iterable[tuple[Call, list[tuple[int, Node]]]]:
        """(call, its nodes), without calls in modules that strategies run."""
        calls: dict[tuple[Call, tuple[int | None, ...]], list[tuple[int, Node]]] = {}
        for index, node in enumerate(self.tape.nodes):
            if node.call is not None and not self._in_strategy_module(node.call.module):
                calls.setdefault((node.call, node.call_inputs), []).append((index, node))
        return [(call, nodes) for (call, _), nodes in calls.items()]

    def _target(self, nodes: list[tuple[int, Node]]) -> tuple[Target, bool]:
        """The target states of the inputs and outputs of one call, and whether it needs a rule."""
        arguments = nodes[0][1].call_inputs
        inputs: list[State | None] = [None] * len(arguments)
        necessary = False
        for index, node in nodes:
            for ref, state in zip(node.ins, self._option(index).ins):
                for position, value in enumerate(arguments):
                    if value == ref.i and inputs[position] is None:
                        inputs[position] = state
                        necessary |= state != self._state(ref.i)
        outputs: Row | None = None
        last = nodes[-1][0]
        option = self._option(last)
        others = self.problem.options[self.quotient.node(last)]
        if _derived(others, option.ins) != option.outs or self._weighs_otherwise(nodes[-1][1], option):
            outputs, necessary = option.outs, True
        return (tuple(inputs), outputs), necessary

    def _weighs_otherwise(self, node: Node, option: Option) -> bool:
        """Whether the runtime might choose another row, as it does not know that no gradient flows to an input.

        It takes the sum of that gradient into account: it would rather gather a part of a weight, or sum the gradients of the
        other inputs as well.
        """
        values, inputs = self.tape.values, list(zip(node.ins, option.ins, strict=True))
        shards = [r for r, state in inputs if any(map(is_shard, along(state)))]
        parts = any(not (values[r.i].name or "").startswith("param:") for r in shards)
        partial = any("X" in along(state) for state in option.outs)
        return (parts or partial) and any(
            r not in shards and values[r.i].differentiable and not self.tape.grad[r.i] for r in node.ins
        )

    def collectives(self) -> list[PlannedCollective]:
        """The collectives of one step that the placement causes; equal ones are counted together."""
        counted: dict[tuple[str, str, int, str, str, str], int] = defaultdict(int)
        for conversion in self.placement.conversions:
            c = conversion.collective
            readers = [n for n, _ in conversion.consumers]
            divided = (n != RESULT and self._in_strategy_module(self.tape.nodes[n].module) for n in readers)
            if readers and all(divided):
                continue
            module, why = self._where(conversion)
            axis = self.axes[c.axis]
            counted[axis, c.kind, c.nbytes, conversion.phase, module, why] += conversion.count
        for index, option in self.placement.options.items():
            node = self.tape.nodes[index]
            for inner in option.collectives if not self._in_strategy_module(node.module) else ():
                axis, module = self.axes[inner.axis], self.collapser.pattern(node.module)
                key = (axis, inner.kind, inner.nbytes, "forward", module, f"inside {node.name}")
                counted[key] += self.quotient.node_count[index] * self.placement.times
        names = ("axis", "kind", "nbytes", "phase", "module", "why")
        return [PlannedCollective(**dict(zip(names, key)), count=n) for key, n in counted.items()]  # type: ignore[arg-type]

    def _in_strategy_module(self, module: str) -> bool:
        return f"{module}.".startswith(self.strategy_modules)

    def _where(self, conversion: Conversion) -> tuple[str, str]:
        source, target = format_state(conversion.source), format_state(conversion.target)
        name = self.tape.values[conversion.value].name
        what = f" of {name.partition(':')[2]}" if name else ""
        node = next((n for n, _ in conversion.consumers if n != RESULT), None)
        if node is None:
            return "", f"{source}->{target}{what} for the result"
        reader = self.tape.nodes[node]
        function = reader.call.function if reader.call is not None else reader.name
        more = len(conversion.consumers) - 1
        others = f" and {more} more" if more else ""
        return self.collapser.pattern(reader.module), f"{source}->{target}{what} for {function}{others}"


def _by_forward(
    targets: Mapping[str, Mapping[int, Target]],
) -> Iterator[tuple[int | None, dict[str, Target]]]:
    """Number of a forward and module -> target of its call there; number None: all forwards of each module want the same."""
    if all(len(set(by_forward.values())) == 1 for by_forward in targets.values()):
        yield None, {module: next(iter(by_forward.values())) for module, by_forward in targets.items()}
        return
    for forward in sorted({number for by_forward in targets.values() for number in by_forward}):
        yield forward, {m: by_forward[forward] for m, by_forward in targets.items() if forward in by_forward}


def _derived(options: Sequence[Option], ins: States) -> States:
    """The output states that the runtime derives from these inputs: on one axis after the other, those of the first row."""
    matching = [o for o in options if o.ins == ins]
    if matching and all(isinstance(s, tuple) for s in (*ins, *matching[0].outs)):

        def on_outer(states: States) -> States:
            return tuple(along(state)[0] for state in states)

        first = next(o for o in options if on_outer(o.ins) == on_outer(ins))
        matching = [o for o in matching if on_outer(o.outs) == on_outer(first.outs)]
    return matching[0].outs if matching else ()
