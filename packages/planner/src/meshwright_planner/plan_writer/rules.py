"""From a placement to the plan that says it: parameter rules, activation rules, planned collectives."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from meshwright_dtensor.plan import ActivationRule, ParameterRule, PlannedCollective
from meshwright_dtensor.sharding.states import State, States, format_state
from meshwright_dtensor.trace.graph import Call, Node
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.placement.problem import RESULT, Placement, PlacementProblem
from meshwright_planner.placement.solution import along
from meshwright_planner.plan_writer.patterns import Collapser
from meshwright_planner.trace.quotient import carried

Row = tuple[State | None, ...]


@dataclass(frozen=True)
class _Wanted:
    """What one call must be given and must give. None: nothing to say."""

    inputs: Row
    outputs: Row | None


class Writer:
    """Writes one placement on the searched axes.

    Args:
        problem, placement: the search and its answer.
        axes: the searched axes, outermost first; without any, nothing is said of them.
        placed: parameter name -> mesh axis -> state, of parameters that strategies place themselves.
        apart: names of modules that strategies run themselves: nothing is said of the calls in them.
    """

    def __init__(
        self,
        problem: PlacementProblem,
        placement: Placement,
        axes: Sequence[str],
        placed: Mapping[str, Mapping[str, str]] | None = None,
        apart: Iterable[str] = (),
    ) -> None:
        self.problem, self.placement, self.axes = problem, placement, tuple(axes)
        self.placed, self.apart = dict(placed or {}), tuple(f"{name}." for name in apart)
        self.tape, self.quotient = problem.tape, problem.quotient
        self.collapser = Collapser(self.quotient.groups)
        self._left: dict[int, State] = {}
        for index, node in enumerate(self.tape.nodes):
            for ref, state in zip(node.outs, self._option(index).outs):
                self._left[ref.i] = state

    def _option(self, index: int) -> _OptionStates:
        option = self.placement.options[self.quotient.node(index)]
        return _OptionStates(option.ins, option.outs)

    def _state(self, value: int) -> State:
        """The state in which its producer leaves a value."""
        if value in self._left:
            return self._left[value]
        return self.placement.stored.get(self.quotient.value(value), self.problem.whole)

    def splits_sequence(self) -> bool:
        """Whether what flows from block to block is split along the sequence."""
        values = carried(self.tape, self.quotient)
        return any(self.problem.legality.splits_sequence(v, self._state(v)) for v in values)

    def parameter_state(self, name: str) -> State:
        """How parameter `name` is stored."""
        value = self.tape.parameters.get(name)
        whole = self.problem.whole
        return whole if value is None else self.placement.stored.get(self.quotient.value(value), whole)

    def parameters(self, model: nn.Module) -> list[ParameterRule]:
        """Rules for every sharded parameter; tied names are all named."""
        first = {id(p): name for name, p in model.named_parameters(remove_duplicate=True)}
        wanted: dict[str, tuple[tuple[str, str], ...]] = {}
        for name, p in model.named_parameters(remove_duplicate=False):
            state = self.parameter_state(first[id(p)])
            states = {a: format_state(s) for a, s in zip(self.axes, along(state)) if s != "I"}
            wanted[name] = tuple(sorted((states | dict(self.placed.get(first[id(p)], {}))).items()))
        return [
            ParameterRule(pattern=pattern, placement=dict(states))
            for pattern, states, _ in self.collapser.collapse(wanted)
            if states
        ]

    def activations(self) -> list[ActivationRule]:
        """Rules for the calls at which something is converted, or whose result is not what is derived."""
        rows: dict[tuple[str, int], dict[str, _Wanted]] = defaultdict(dict)
        needed: set[Call] = set()
        for call, nodes in self._calls():
            wanted, necessary = self._wanted(nodes)
            by_module = rows[call.function, call.occurrence]
            if necessary and by_module.get(call.module, wanted) == wanted:
                needed.add(call)
            by_module.setdefault(call.module, wanted)
        rules = []
        for (function, occurrence), by_module in rows.items():
            spoken = {m for m in by_module if Call(m, function, occurrence) in needed}
            if not spoken:
                continue
            for pattern, wanted, modules in self.collapser.collapse(by_module):
                if not spoken.isdisjoint(modules):
                    rules.append(
                        ActivationRule(
                            module=pattern,
                            function=function,
                            occurrence=occurrence,
                            inputs=self._texts(wanted.inputs),
                            outputs=None if wanted.outputs is None else self._texts(wanted.outputs),
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
        found: dict[tuple[Call, tuple[int | None, ...]], list[tuple[int, Node]]] = {}
        for index, node in enumerate(self.tape.nodes):
            if node.call is not None and not self._is_apart(node.call.module):
                # a module may run twice in one forward: the same address with other inputs
                found.setdefault((node.call, node.call_inputs), []).append((index, node))
        return [(call, nodes) for (call, _), nodes in found.items()]

    def _wanted(self, nodes: list[tuple[int, Node]]) -> tuple[_Wanted, bool]:
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
        if _derived(others, option.ins) != option.outs:
            outputs, necessary = option.outs, True
        return _Wanted(tuple(inputs), outputs), necessary

    def collectives(self) -> list[PlannedCollective]:
        """What the placement makes one step communicate, equal ones counted together."""
        counted: dict[tuple[str, str, int, str, str, str], int] = defaultdict(int)
        for conversion in self.placement.conversions:
            c = conversion.collective
            readers = [n for n, _ in conversion.consumers]
            if readers and all(n != RESULT and self._is_apart(self.tape.nodes[n].module) for n in readers):
                continue
            module, why = self._where(conversion)
            axis = self.axes[c.axis]
            counted[axis, c.kind, c.nbytes, conversion.phase, module, why] += conversion.count
        for index, option in self.placement.options.items():
            node = self.tape.nodes[index]
            for made in option.collectives if not self._is_apart(node.module) else ():
                axis, module = self.axes[made.axis], self.collapser.pattern(node.module)
                key = (axis, made.kind, made.nbytes, "forward", module, f"inside {node.name}")
                counted[key] += self.quotient.node_count[index] * self.placement.times
        return [
            PlannedCollective(
                axis=axis, kind=kind, nbytes=nbytes, count=count, phase=phase, module=module, why=why
            )  # type: ignore[arg-type]
            for (axis, kind, nbytes, phase, module, why), count in counted.items()
        ]

    def _is_apart(self, module: str) -> bool:
        return bool(self.apart) and f"{module}.".startswith(self.apart)

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


def _derived(options: Sequence[Option], ins: States) -> States:
    """The results that the runtime derives from these inputs by itself: on one axis after the other, those of the first row."""
    alike = [o for o in options if o.ins == ins]
    if alike and all(isinstance(s, tuple) for s in (*ins, *alike[0].outs)):
        outer = [tuple(along(s)[0] for s in o.ins) == tuple(along(s)[0] for s in ins) for o in options]
        first = next(o for o, same in zip(options, outer, strict=True) if same)
        alike = [o for o in alike if all(along(a)[0] == along(b)[0] for a, b in zip(o.outs, first.outs))]
    return alike[0].outs if alike else ()


@dataclass(frozen=True)
class _OptionStates:
    ins: States
    outs: States
