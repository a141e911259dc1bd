"""Sharding propagation without a mesh: predicts the states and collectives of a recorded run.

It uses the same rules, policy and fallback as dispatch/derive.py, call by call.  A planner predicts here what a model does
with sharded inputs.  A call without a local program is run on gathered inputs, and every rank computes all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch

from meshwright_dtensor._torch.core import pytree, quiet_fakes
from meshwright_dtensor._torch.modes import fake_mode
from meshwright_dtensor.cluster.links import CollectiveKind
from meshwright_dtensor.comm.collectives import Step
from meshwright_dtensor.comm.redistribute import steps_between
from meshwright_dtensor.propagate.choose import Choice, Chooser, MeshShape, Underivable, is_view
from meshwright_dtensor.propagate.rewrites import check_writes, choose_with_rewrites, hoist
from meshwright_dtensor.rules import NodeView, RuleBook, Strategy, needs_data
from meshwright_dtensor.sharding.states import I, States, format_state, forward_kind, is_shard
from meshwright_dtensor.strategy.cost import Phase
from meshwright_dtensor.trace.function_kinds import DATA_DEPENDENT, is_in_place
from meshwright_dtensor.trace.graph import Call, Node, Ref, Value, is_ref
from meshwright_dtensor.utils.host import HOST

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext


@dataclass(frozen=True)
class PredictedMove:
    """A predicted collective.

    Attributes:
        nbytes: of the full tensor on the mesh axis.
        module, function: of the call that needs it.
        why: the states converted, or "inside ..." of a composite.
        value: index of the value that is moved; None inside of a composite.
    """

    kind: CollectiveKind
    axis: str
    nbytes: int
    phase: Phase
    module: str
    function: str
    why: str
    value: int | None = None


@dataclass
class PredictedRun:
    """States and communication of a recorded run.

    Attributes:
        ins, outs: per node, the states of its inputs and outputs.
        states: value -> its states after the run, of values that are not replicated.
        moved: collectives, without those of single numbers.
        gathered: node -> why the call that it belongs to has no local program: its inputs are gathered.
    """

    ins: list[tuple[States, ...]] = field(default_factory=list)
    outs: list[tuple[States, ...]] = field(default_factory=list)
    states: dict[int, States] = field(default_factory=dict)
    moved: list[PredictedMove] = field(default_factory=list)
    gathered: dict[int, str] = field(default_factory=dict)


NodeStates = tuple[tuple[States, ...], tuple[States, ...]]
"""The states of the inputs and of the outputs of a node."""


@dataclass
class _Group:
    """The nodes of one call with their indices, and the values that they read from outside of it."""

    indices: list[int]
    nodes: list[Node]
    outside: list[int]


@dataclass
class _Conversion:
    value: int
    source: States
    target: States
    node: Node
    backward: bool = False


_Made = dict[tuple[int, States, States], _Conversion]
"""(value, source, target) -> conversion."""


@dataclass
class Predictor:
    """Predicts a recorded run, call by call.

    Args:
        nodes, values: recorded with global shapes.
        grad: per value, whether a gradient may flow to it.
        start: value -> states, of parameters and of inputs.
        weights: those that are parameters.
        fixed: node -> states of its inputs and outputs if a strategy runs the node itself, else None.
        same_as: node -> a key, equal for nodes that do the same with tensors of the same shapes; they are derived once.
        results: values that the caller gets, from which the backward pass starts.
    """

    grid: MeshShape
    book: RuleBook
    nodes: Sequence[Node]
    values: Sequence[Value]
    grad: Sequence[bool]
    start: Mapping[int, States]
    weights: Collection[int]
    fixed: Callable[[int], NodeStates | None] = lambda index: None
    same_as: Callable[[int], Hashable] = lambda index: index
    results: Collection[int] = ()

    def __post_init__(self) -> None:
        self.grad = _receives_gradient(self.nodes, self.grad, self.results)
        self.whole: States = (I,) * self.grid.ndim
        self.states: dict[int, States] = dict(self.start)
        # plain tensors: neither parameters nor inputs, nor computed from any
        made = {r.i for n in self.nodes if n.call is not None for r in n.outs}
        self.plain = {r.i for n in self.nodes for r in (*n.ins, *n.outs)} - made - set(self.start)
        self.readers = {r.i for n in self.nodes for r in n.ins} | set(self.results)
        self.predicted = PredictedRun()
        self._chosen: dict[Hashable, Choice | str] = {}
        self._made: _Made = {}
        self._all: list[_Conversion] = []

    def run(self) -> PredictedRun:
        """All calls in order."""

        def call_key(index: int) -> tuple[Call | None, tuple[int | None, ...], bool]:
            node = self.nodes[index]
            return node.call, node.call_inputs, self.fixed(index) is not None

        for (call, _, is_fixed), members in itertools.groupby(range(len(self.nodes)), call_key):
            indices = list(members)
            if call is not None and not is_fixed:
                nodes = [self.nodes[k] for k in indices]
                made = {r.i for node in nodes for r in node.outs}
                outside = dict.fromkeys(r.i for node in nodes for r in node.ins if r.i not in made)
                self._predict_call(_Group(indices, nodes, list(outside)))
                continue
            for k in indices:
                self._add(k, *(self.fixed(k) or self._replicated(self.nodes[k])))
        for conversion in self._all:
            self._report(conversion)
        self.predicted.states = {i: s for i, s in self.states.items() if s != self.whole}
        return self.predicted

    def _replicated(self, node: Node) -> NodeStates:
        return (self.whole,) * len(node.ins), (self.whole,) * len(node.outs)

    def _add(self, index: int, ins: Iterable[States], outs: Iterable[States]) -> None:
        made = tuple(outs)
        self.predicted.ins.append(tuple(ins))
        self.predicted.outs.append(made)
        self.states.update((r.i, s) for r, s in zip(self.nodes[index].outs, made, strict=True))

    # ---- one call
    def _predict_call(self, group: _Group) -> None:
        start = {i: self.states.get(i, self.whole) for i in group.outside}
        choice = self._choice(group, start)
        if isinstance(choice, str):
            self._gather(group, choice)
            return
        _, _, hoisted = hoist(group.nodes, self._results(group), choice, start)
        inner: _Made = {}
        current = dict(start)
        for k, node, ins, outs in zip(group.indices, group.nodes, choice.ins, choice.outs, strict=True):
            backward = any(self.grad[r.i] for r in node.outs)
            for ref, wanted in zip(node.ins, ins, strict=True):
                source = current.get(ref.i, self.whole)
                if hoisted and ref.i not in self.weights:
                    self._convert(ref.i, source, wanted, node, backward)
                else:
                    self._convert_once(inner, _Conversion(ref.i, source, wanted, node), backward)
            current.update((r.i, s) for r, s in zip(node.outs, outs, strict=True))
            self._composite_collectives(node, ins, outs, backward)
            self._add(k, ins, outs)

    def _results(self, group: _Group) -> list[Ref]:
        """Outputs of a call that are read later."""
        return [r for n in group.nodes for r in n.outs if r.i in self.readers]

    def _choice(self, group: _Group, start: Mapping[int, States]) -> Choice | str:
        """States of the ops of a call; or why it is run on gathered values."""
        call = group.nodes[0].call
        assert call is not None
        if call.function in DATA_DEPENDENT or not all(map(self._runs_on_fakes, group.nodes)):
            return "depends on the data"
        if all(states == self.whole for states in start.values()):
            ins, outs = zip(*map(self._replicated, group.nodes), strict=True)
            return Choice(list(map(list, ins)), list(map(list, outs)))
        key = self._key(group, start)
        if key not in self._chosen:
            try:
                self._chosen[key] = self._derive(group, start)
            except Underivable as error:
                self._chosen[key] = str(error)
        return self._chosen[key]

    def _runs_on_fakes(self, node: Node) -> bool:
        """Whether an op can be derived; ops that may need values (an index may be a mask) are tried."""
        if not needs_data(node):
            return True

        def fake(x: Any) -> Any:
            return (
                torch.empty(self.values[x.i].shape, dtype=self.values[x.i].dtype, device=HOST)
                if is_ref(x)
                else x
            )

        with fake_mode(), quiet_fakes(), torch.no_grad():
            args, kwargs = pytree.tree_map(fake, (node.args, node.kwargs), is_leaf=is_ref)
            try:
                node.op(*args, **kwargs)
            except Exception:
                # torch has many errors for this
                return False
        return True

    def _derive(self, group: _Group, start: Mapping[int, States]) -> Choice:
        plain = frozenset(self.plain.intersection(group.outside))
        chooser = Chooser(self.grid, self.book, group.nodes, self.values, self.weights, plain)
        choice = choose_with_rewrites(chooser, start)
        results = self._results(group)
        check_writes(group.nodes, results, choice, start)
        _, _, hoisted = hoist(group.nodes, results, choice, start)
        if not hoisted and set(group.outside) - set(group.nodes[0].call_inputs):
            raise Underivable("moves data between its ops; and it makes a tensor constant inside")
        return choice

    def _key(self, group: _Group, start: Mapping[int, States]) -> Hashable:
        number: dict[int, int] = {}
        pattern = tuple(number.setdefault(r.i, len(number)) for n in group.nodes for r in (*n.ins, *n.outs))
        states = tuple((start[i], i in self.plain, i in self.weights) for i in group.outside)
        later = tuple(r.i in self.readers for n in group.nodes for r in n.outs)
        return tuple(self.same_as(k) for k in group.indices), pattern, states, later

    def _gather(self, group: _Group, why: str) -> None:
        """Run a call on gathered inputs on every rank; a write is sharded again."""
        first = group.nodes[0]
        assert first.call is not None
        inputs = dict.fromkeys(i for i in (*first.call_inputs, *group.outside) if i is not None)
        backward = any(self.grad[r.i] for n in group.nodes for r in n.outs)
        for i in inputs:
            self._convert(i, self.states.get(i, self.whole), self.whole, first, backward)
        target = first.call_inputs[0] if is_in_place(first.call.function) and first.call_inputs else None
        states = self.whole if target is None else self.states.get(target, self.whole)
        for k, node in zip(group.indices, group.nodes, strict=True):
            self.predicted.gathered[k] = why
            self._add(k, *self._replicated(node))
        if target is not None:
            self._write_back(group, target, states)

    def _write_back(self, group: _Group, target: int, states: States) -> None:
        """Shard what the nodes of a gathered call write to ``target``, directly or through views, in its ``states``."""
        # views of the target, and new versions of all of it
        aliases, complete = {target}, {target}
        for node in group.nodes:
            if not (node.ins and node.ins[0].i in aliases and (node.mutates or is_view(node))):
                continue
            aliases.update(r.i for r in node.outs)
            if not node.mutates:
                continue
            if node.ins[0].i in complete:
                complete.update(r.i for r in node.outs)
            if states != self.whole:
                written = node.outs[0].i if node.outs[0].i in complete else target
                self._convert(written, self.whole, states, node, self.grad[written])
                self.states[written] = states

    # ---- conversions
    def _convert(self, value: int, source: States, target: States, node: Node, backward: bool) -> None:
        """As `global_tensor.local_in`: all readers share a reduction and a move."""
        if source == target:
            return
        between = tuple("I" if a == "P" and b == "X" else a for a, b in zip(source, target, strict=True))
        if between != source:
            self._convert(value, source, between, node, backward)
            source = between
        conversion = _Conversion(value, source, target, node)
        moves = any(step.collective for _, phase, step in self._steps(conversion) if phase == "forward")
        changes = any(forward_kind(a) != forward_kind(b) for a, b in zip(source, target, strict=True))
        self._convert_once(self._made if moves or not changes else {}, conversion, backward)

    def _convert_once(self, made: _Made, conversion: _Conversion, backward: bool) -> None:
        if conversion.source == conversion.target:
            return
        key = conversion.value, conversion.source, conversion.target
        if key not in made:
            made[key] = conversion
            self._all.append(conversion)
        made[key].backward |= backward and self.grad[conversion.value]

    def _steps(self, conversion: _Conversion) -> Iterator[tuple[tuple[int, ...], Phase, Step]]:
        """(shape before the split over the axis, pass, step) of each single-axis change."""
        grid, states = cast("MeshContext", self.grid), (conversion.source, conversion.target)
        shape, first_rank = self.values[conversion.value].shape, (0,) * grid.ndim
        for sizes, forward, backward in steps_between(grid, *states, shape, first_rank):
            passes: tuple[tuple[Phase, Step], ...] = (("forward", forward), ("backward", backward))
            for phase, step in passes:
                if step.source != step.target and grid.sizes[step.axis] > 1:
                    yield sizes, phase, step

    def _report(self, conversion: _Conversion) -> None:
        value = self.values[conversion.value]
        if math.prod(value.shape) == 1:
            return
        for sizes, phase, step in self._steps(conversion):
            if step.collective is not None and (phase == "forward" or conversion.backward):
                nbytes = math.prod(sizes) * value.dtype.itemsize
                why = f"{format_state(step.source)}->{format_state(step.target)}"
                self._moved(step.collective, step.axis, nbytes, phase, conversion.node, why, conversion.value)

    def _composite_collectives(
        self, node: Node, ins: Sequence[States], outs: Sequence[States], backward: bool
    ) -> None:
        """Collectives inside of a composite, without sums of two numbers."""
        if node.op is not None:
            return
        composite = self.book.composite(node.name)
        for axis, n in enumerate(self.grid.sizes):
            row_ins, row_outs = (tuple(forward_kind(s[axis]) for s in states) for states in (ins, outs))
            if not any(map(is_shard, row_ins)):
                continue
            # local to all other axes
            shapes = {
                ref: self.grid.local(self.values[ref.i].shape, (*states[:axis], I, *states[axis + 1 :]))
                for ref, states in zip((*node.ins, *node.outs), (*ins, *outs), strict=True)
            }
            dtypes = {ref: self.values[ref.i].dtype for ref in shapes}
            view = NodeView.with_shapes(node, shapes, dtypes, n)
            total = composite.extra_comm_bytes(view, Strategy(row_ins, row_outs, "hand"))
            later = total * composite.comm_backward
            if total - later > _NUMBERS:
                self._moved("all_reduce", axis, int(total - later), "forward", node, f"inside {node.name}")
            if backward and later > _NUMBERS:
                self._moved("all_reduce", axis, int(later), "backward", node, f"inside {node.name}")

    def _moved(
        self, kind: str, axis: int, nbytes: int, phase: Phase, node: Node, why: str, value: int | None = None
    ) -> None:
        function = node.name if node.call is None else node.call.function
        name, collective = self.grid.axes[axis], cast("CollectiveKind", kind)
        move = PredictedMove(collective, name, nbytes, phase, node.module, function, why, value)
        self.predicted.moved.append(move)


def _receives_gradient(nodes: Sequence[Node], grad: Sequence[bool], results: Collection[int]) -> list[bool]:
    """Per value, whether a gradient arrives at it from the results: it may have no reader."""
    receives = [False] * len(grad)
    root: dict[int, int] = {}
    for node in nodes:
        if node.ins and (node.mutates or is_view(node)):
            root.update((r.i, root.get(node.ins[0].i, node.ins[0].i)) for r in node.outs)
    for i in results:
        receives[i] = grad[i]
    arrived = {root.get(i, i) for i in results if grad[i]}
    for node in reversed(nodes):
        # a write to a part of a tensor is read by the readers of the tensor
        part = node.mutates and node.ins and root.get(node.ins[0].i, node.ins[0].i) in arrived
        if part or any(receives[r.i] for r in node.outs):
            for ref in node.ins:
                receives[ref.i] |= grad[ref.i]
            if part and any(grad[r.i] for r in node.ins):
                for ref in node.outs:
                    receives[ref.i] = True
            arrived.update(root.get(r.i, r.i) for r in node.ins if grad[r.i])
    return receives


_NUMBERS = 16
"""Bytes of a sum and a count: collectives of no more bytes are left out."""
