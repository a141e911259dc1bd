"""What global tensors will do with a run that was recorded: the states of every value, and what is communicated for them.

The same rules, policy and fallback as :mod:`derive`, call by call, without a mesh: a planner asks here what becomes of a model
whose inputs are sharded, before there are ranks.  What a call that has no local program costs is then known: its inputs are
gathered, and every rank computes all of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from meshwright_dtensor._torch.core import fake_mode, pytree, quiet_fakes
from meshwright_dtensor.cluster.links import CollectiveKind
from meshwright_dtensor.comm.collectives import Step
from meshwright_dtensor.comm.redistribute import route
from meshwright_dtensor.propagate.choose import Choice, Chooser, Underivable
from meshwright_dtensor.propagate.prediction import MeshShape, PredictedMove, PredictedRun
from meshwright_dtensor.propagate.rewrites import check_writes, choose_with_rewrites, hoist, is_view
from meshwright_dtensor.rules import NodeView, RuleBook, Strategy, needs_data
from meshwright_dtensor.sharding.states import (
    I,
    R,
    State,
    States,
    format_state,
    forward_kind,
    gradient_kind,
)
from meshwright_dtensor.strategy.cost import Phase
from meshwright_dtensor.trace.function_kinds import DATA_DEPENDENT, is_in_place
from meshwright_dtensor.trace.graph import Call, Node, Ref, Value, is_ref

if TYPE_CHECKING:
    from meshwright_dtensor.mesh.context import MeshContext


def predict_run(
    grid: MeshShape,
    book: RuleBook,
    nodes: Sequence[Node],
    values: Sequence[Value],
    grad: Sequence[bool],
    start: Mapping[int, States],
    weights: Collection[int],
    known: Callable[[int], tuple[tuple[States, ...], tuple[States, ...]] | None] = lambda index: None,
    like: Callable[[int], Hashable] = lambda index: index,
    results: Collection[int] = (),
) -> PredictedRun:
    """Follow a recorded run through its calls.

    Args:
        nodes, values: recorded with global shapes.
        grad: per value, whether a gradient may flow to it.
        start: value -> states, of parameters and of inputs.
        weights: those that are parameters.
        known: node -> states of its inputs and outputs where somebody else runs it than the core, None elsewhere.
        like: node -> equal for nodes that do the same with tensors of the same shapes: those are looked at once.
        results: values that the caller gets, of which the backward pass starts.
    """
    return _Follower(grid, book, nodes, values, grad, start, weights, known, like, results).run()


@dataclass
class _Group:
    """The nodes of one call, the values that come from outside, and what it is called with."""

    places: list[int]
    nodes: list[Node]
    outside: list[int]


@dataclass
class _Conversion:
    module: str
    function: str
    back: bool = False


class _Follower:
    def __init__(
        self,
        grid: MeshShape,
        book: RuleBook,
        nodes: Sequence[Node],
        values: Sequence[Value],
        grad: Sequence[bool],
        start: Mapping[int, States],
        weights: Collection[int],
        known: Callable[[int], tuple[tuple[States, ...], tuple[States, ...]] | None],
        like: Callable[[int], Hashable],
        results: Collection[int],
    ) -> None:
        self.grid, self.book, self.nodes, self.values = grid, book, nodes, values
        self.grad = _arriving(nodes, grad, results)
        self.weights, self.known, self.like = weights, known, like
        self.whole: States = (I,) * grid.ndim
        self.states: dict[int, States] = dict(start)
        # plain tensors: neither parameters nor inputs, nor made of any
        made = {r.i for n in nodes if n.call is not None for r in n.outs}
        self.plain = {r.i for n in nodes for r in (*n.ins, *n.outs)} - made - set(start)
        self.readers = {r.i for n in nodes for r in n.ins} | set(results)
        self.found = PredictedRun()
        self._chosen: dict[Hashable, Choice | str] = {}
        self._made: dict[tuple[int, States, States], _Conversion] = {}
        self._all: list[tuple[int, States, States, _Conversion]] = []

    def run(self) -> PredictedRun:
        """All calls in order."""
        for (call, _, taken), members in itertools.groupby(range(len(self.nodes)), self._like_call):
            places = list(members)
            if call is not None and not taken:
                self._through(self._group(places))
                continue
            for k in places:
                ins, outs = self.known(k) or self._outside(self.nodes[k])
                self._ran(k, ins, outs)
        for value, source, target, conversion in self._all:
            self._report(value, source, target, conversion)
        self.found.states = {i: s for i, s in self.states.items() if s != self.whole}
        return self.found

    def _like_call(self, index: int) -> tuple[Call | None, tuple[int | None, ...], bool]:
        node = self.nodes[index]
        return node.call, node.call_inputs, self.known(index) is not None

    def _outside(self, node: Node) -> tuple[tuple[States, ...], tuple[States, ...]]:
        return (self.whole,) * len(node.ins), (self.whole,) * len(node.outs)

    def _ran(self, index: int, ins: Iterable[States], outs: Iterable[States]) -> None:
        self.found.ins.append(tuple(ins))
        self.found.outs.append(tuple(outs))
        self.states.update((r.i, s) for r, s in zip(self.nodes[index].outs, self.found.outs[-1], strict=True))

    def _group(self, places: list[int]) -> _Group:
        nodes = [self.nodes[k] for k in places]
        made: set[int] = set()
        outside: dict[int, None] = {}
        for node in nodes:
            outside.update((r.i, None) for r in node.ins if r.i not in made)
            made.update(r.i for r in node.outs)
        return _Group(places, nodes, list(outside))

    # ---- one call
    def _through(self, group: _Group) -> None:
        start = {i: self.states.get(i, self.whole) for i in group.outside}
        choice = self._choice(group, start)
        if isinstance(choice, str):
            self._gathered(group, choice)
            return
        _, _, hoisted = hoist(group.nodes, self._results(group), choice, start)
        inner: dict[tuple[int, States, States], _Conversion] = {}
        current = dict(start)
        for k, node, ins, outs in zip(group.places, group.nodes, choice.ins, choice.outs, strict=True):
            back = any(self.grad[r.i] for r in node.outs)
            for ref, wanted in zip(node.ins, ins, strict=True):
                source = current.get(ref.i, self.whole)
                if hoisted and ref.i not in self.weights:
                    self._convert(ref.i, source, wanted, node, back)
                else:
                    self._once(inner, ref.i, source, wanted, node, back)
            current.update((r.i, s) for r, s in zip(node.outs, outs, strict=True))
            self._inside(node, ins, outs, back)
            self._ran(k, ins, outs)

    def _results(self, group: _Group) -> list[Ref]:
        """What of a call is read later."""
        return [r for n in group.nodes for r in n.outs if r.i in self.readers]

    def _choice(self, group: _Group, start: Mapping[int, States]) -> Choice | str:
        """States of its ops; or why it is run on whole values."""
        call = group.nodes[0].call
        assert call is not None
        if call.function in DATA_DEPENDENT or not all(map(self._runs_on_fakes, group.nodes)):
            return "depends on the data"
        if all(states == self.whole for states in start.values()):
            rows = [self._outside(node) for node in group.nodes]
            return Choice([list(ins) for ins, _ in rows], [list(outs) for _, outs in rows])
        key = self._key(group, start)
        if key not in self._chosen:
            try:
                self._chosen[key] = self._derived(group, start)
            except Underivable as error:
                self._chosen[key] = str(error)
        return self._chosen[key]

    def _runs_on_fakes(self, node: Node) -> bool:
        """Whether an op can be derived: of those that may need values (an index, which may be a mask) it is tried."""
        if not needs_data(node):
            return True
        with fake_mode(), quiet_fakes(), torch.no_grad():
            args, kwargs = pytree.tree_map(self._fake, (node.args, node.kwargs), is_leaf=is_ref)
            try:
                node.op(*args, **kwargs)
            except Exception:  # torch has many errors for this
                return False
        return True

    def _fake(self, x: Any) -> Any:
        if not isinstance(x, Ref):
            return x
        value = self.values[x.i]
        return torch.empty(value.shape, dtype=value.dtype)

    def _derived(self, group: _Group, start: Mapping[int, States]) -> Choice:
        plain = frozenset(self.plain.intersection(group.outside))
        chooser = Chooser(self.grid, self.book, group.nodes, self.values, plain)
        choice = choose_with_rewrites(chooser, start, self.weights)
        results = self._results(group)
        check_writes(group.nodes, results, choice, start)
        _, _, hoisted = hoist(group.nodes, results, choice, start)
        if not hoisted and set(group.outside) - set(group.nodes[0].call_inputs):
            raise Underivable("moves data between its ops; and it makes a tensor constant inside")
        return choice

    def _key(self, group: _Group, start: Mapping[int, States]) -> Hashable:
        number: dict[int, int] = {}
        pattern = tuple(number.setdefault(r.i, len(number)) for n in group.nodes for r in (*n.ins, *n.outs))
        lies = tuple((start[i], i in self.plain, i in self.weights) for i in group.outside)
        later = tuple(r.i in self.readers for n in group.nodes for r in n.outs)
        return tuple(self.like(k) for k in group.places), pattern, lies, later

    def _gathered(self, group: _Group, why: str) -> None:
        """All of a call on every rank; a write goes back to where the shards are."""
        first = group.nodes[0]
        assert first.call is not None
        inputs = dict.fromkeys(i for i in (*first.call_inputs, *group.outside) if i is not None)
        back = any(self.grad[r.i] for n in group.nodes for r in n.outs)
        for i in inputs:
            self._convert(i, self.states.get(i, self.whole), self.whole, first, back)
        target = first.call_inputs[0] if is_in_place(first.call.function) and first.call_inputs else None
        lies = self.whole if target is None else self.states.get(target, self.whole)
        aliases, named = {target}, {target}  # of those, the ones that have all of it
        for k, node in zip(group.places, group.nodes, strict=True):
            self.found.gathered[k] = why
            self._ran(k, *self._outside(node))
            if node.ins and node.ins[0].i in aliases and (node.mutates or is_view(node)):
                aliases.update(r.i for r in node.outs)
                if node.mutates and node.ins[0].i in named:
                    named.update(r.i for r in node.outs)
                if node.mutates and lies != self.whole and target is not None:
                    written = node.outs[0].i if node.outs[0].i in named else target
                    self._convert(written, self.whole, lies, node, self.grad[written])
                    self.states[written] = lies

    # ---- conversions
    def _convert(self, value: int, source: States, target: States, node: Node, back: bool) -> None:
        """As `global_tensor.local_in`: a reduction is shared by all that need it, and what is moved is moved once."""
        if source == target:
            return
        between = tuple("I" if a == "P" and b == "X" else a for a, b in zip(source, target, strict=True))
        if between != source:
            self._convert(value, source, between, node, back)
            source = between
        moves = any(kind for _, phase, kind, _ in self._steps(value, source, target) if phase == "forward")
        changes = any(forward_kind(a) != forward_kind(b) for a, b in zip(source, target, strict=True))
        self._once(self._made if moves or not changes else {}, value, source, target, node, back)

    def _once(
        self,
        made: dict[tuple[int, States, States], _Conversion],
        value: int,
        source: States,
        target: States,
        node: Node,
        back: bool,
    ) -> None:
        if source == target:
            return
        conversion = made.get((value, source, target))
        if conversion is None:
            function = node.name if node.call is None else node.call.function
            conversion = made[value, source, target] = _Conversion(node.module, function)
            self._all.append((value, source, target, conversion))
        conversion.back |= back and self.grad[value]

    def _steps(
        self, value: int, source: States, target: States
    ) -> Iterable[tuple[int, Phase, CollectiveKind | None, tuple[State, State, int]]]:
        """(axis, pass, collective, (from, to, bytes)) of each single-axis change."""
        grid, seen = self.grid, self.values[value]
        current = list(source)
        for axis, a, b in route(source, target):
            bare = tuple("I" if i == axis else s for i, s in enumerate(current))
            shape = grid.local(seen.shape, bare)
            nbytes = math.prod(shape) * seen.dtype.itemsize
            ways: tuple[tuple[Phase, State, State], ...] = (
                ("forward", forward_kind(a), forward_kind(b)),
                ("backward", gradient_kind(b), gradient_kind(a)),
            )
            for phase, old, new in ways:
                if old != new and grid.sizes[axis] > 1:
                    sizes = [shape[int(s)] if isinstance(s, int) else 0 for s in (old, new)]
                    kind = Step(cast("MeshContext", grid), axis, old, new, *sizes).collective
                    yield axis, phase, cast("CollectiveKind | None", kind), (old, new, nbytes)
            current[axis] = b

    def _report(self, value: int, source: States, target: States, conversion: _Conversion) -> None:
        if math.prod(self.values[value].shape) == 1:
            return
        for axis, phase, kind, (a, b, nbytes) in self._steps(value, source, target):
            if kind is not None and (phase == "forward" or conversion.back):
                why = f"{format_state(a)}->{format_state(b)}"
                self.found.moved.append(
                    PredictedMove(
                        kind,
                        self.grid.axes[axis],
                        nbytes,
                        phase,
                        conversion.module,
                        conversion.function,
                        why,
                        value,
                    )
                )

    def _inside(self, node: Node, ins: Sequence[States], outs: Sequence[States], back: bool) -> None:
        """What a composite communicates by itself, sums of two numbers aside."""
        if node.op is not None:
            return
        composite: Any = self.book.composite(node.name)
        for axis, name in enumerate(self.grid.axes):
            row = [tuple(_raw(s[axis]) for s in states) for states in (ins, outs)]
            if not any(isinstance(s, int) for s in row[0]):
                continue
            # as the other axes leave it
            shapes = {
                ref: self.grid.local(self.values[ref.i].shape, (*lies[:axis], I, *lies[axis + 1 :]))
                for refs, own in ((node.ins, ins), (node.outs, outs))
                for ref, lies in zip(refs, own, strict=True)
            }
            dtypes = {ref: self.values[ref.i].dtype for ref in shapes}
            view = NodeView.with_shapes(node, shapes, dtypes, self.grid.sizes[axis])
            total = composite.extra_comm_bytes(view, Strategy(row[0], row[1], "hand"))
            later = total * composite.comm_backward
            passes: tuple[tuple[Phase, float], ...] = (
                ("forward", total - later),
                ("backward", later if back else 0.0),
            )
            for phase, nbytes in passes:
                if nbytes > _NUMBERS:
                    function = node.name if node.call is None else node.call.function
                    self.found.moved.append(
                        PredictedMove(
                            "all_reduce",
                            name,
                            int(nbytes),
                            phase,
                            node.module,
                            function,
                            f"inside {node.name}",
                        )
                    )


def _arriving(nodes: Sequence[Node], grad: Sequence[bool], results: Collection[int]) -> list[bool]:
    """Per value, whether a gradient comes back to it from the results: nobody may have read it."""
    found = [False] * len(grad)
    root: dict[int, int] = {}
    for node in nodes:
        if node.ins and (node.mutates or is_view(node)):
            root.update((r.i, root.get(node.ins[0].i, node.ins[0].i)) for r in node.outs)
    for i in results:
        found[i] = grad[i]
    arrived = {root.get(i, i) for i in results if grad[i]}
    for node in reversed(nodes):
        # who writes to a part of a tensor is read by those who read the tensor
        part = node.mutates and node.ins and root.get(node.ins[0].i, node.ins[0].i) in arrived
        if part or any(found[r.i] for r in node.outs):
            for ref in node.ins:
                found[ref.i] = found[ref.i] or grad[ref.i]
            for ref in node.outs if part else ():
                found[ref.i] = found[ref.i] or any(grad[r.i] for r in node.ins)
            arrived.update(root.get(r.i, r.i) for r in node.ins if grad[r.i])
    return found


_NUMBERS = 16
"""Bytes of a sum and a count: what is no larger is left out."""


def _raw(state: State) -> State:
    return state if isinstance(state, int) or state == "P" else R
