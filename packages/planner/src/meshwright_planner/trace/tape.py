"""One eager run of a model, recorded: what the planner knows of it.

How it is made is in `trace/recorder/record.py`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from meshwright_dtensor.propagate.prediction import PredictedMove
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_planner.trace.grad_flow import Note, flows
from meshwright_planner.trace.user_checkpoints import times_again

_MAKING = ("zeros", "empty", "ones", "full")
"""Parts of the names of operations that make tensors of which no value was computed."""


class Saved(NamedTuple):
    """A tensor that autograd keeps because of one node.

    Args:
        node: index of the node by whose tensors it is known: the one that keeps it, or that made it just before.
        root: index of the first value of its storage, or None when the recorder never saw it (inner to a composite).
        value: index of the value itself, None likewise.
        output: whether it is one of the node's own outputs.
        nbytes: its size.
        by: index of the node that keeps it.
    """

    node: int
    root: int | None
    value: int | None
    output: bool
    nbytes: int
    by: int


@dataclass(frozen=True)
class Division:
    """What data ranks do beside computing on their own rows.

    Args:
        moved: collectives of one pass forward and backward for which rows of several ranks meet, and how often each comes.
        notes: what users should know of it.
    """

    moved: tuple[tuple[PredictedMove, int], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModuleInfo:
    """A module of the model: class name, number of distinct parameters in it, whether it has no children, and has a forward."""

    kind: str
    parameters: int
    leaf: bool
    runs: bool = True


@dataclass
class Tape:
    """What one run did, without dead code.

    Args:
        values: every value seen; `values[i].name` says which parameter, buffer or input it is.
        nodes: the operations that the results depend on, in order.
        results: values that the caller gets: the loss, else all floating-point outputs.
        grad: per value, whether a gradient flows to it.
        flows: per node and tensor input, whether the node hands a gradient to it.
        again: per node, how often checkpoints of the model itself run it again in the backward pass.
        writes: nodes that write to a part of something which others read whole, and that make what is written to, where
            that is made for it.
        through: views that something is written to through.
        saved: what autograd keeps.
        dropped: what checkpoints of the model itself give up, and have again while they run again.
        inside: per node, numbers of those that it runs in.
        modules: every module by its fully qualified name.
        recorded: number of operations before dead code was removed.
        unused: the dead code, which runs all the same: each operation, and how often it runs again (see `again`).
        real: the run was on real tensors because the model looks at data.
        seconds: how long it took.
        scalar: the result is a scalar loss.
        parameters: name -> value of every distinct parameter.
        rows: size of the batch.
        copied: module that did what another did, and was not run -> that one.
        recompute: rules by which what is saved has been changed.
        tied: first name -> other names of every parameter that has several.
        marks: (module, mesh axis -> state) of each activation that the model marks, where it was run.
        returned: every value that the model returns, in whatever it does.
        calls: (module that calls, module that is called) of every call of a module.
        origin: the tape that this one differs from in sizes only, None where it was recorded itself.
        division: of the tape of a data rank, what it does beside computing on its own rows; None where that is all.
    """

    values: list[Value]
    nodes: list[Node]
    results: list[int]
    grad: list[bool]
    saved: list[Saved]
    modules: Mapping[str, ModuleInfo]
    recorded: int = 0
    real: bool = False
    seconds: float = 0.0
    scalar: bool = False
    parameters: dict[str, int] = field(default_factory=dict)
    rows: int = 1
    origin: Tape | None = None
    flows: list[tuple[bool, ...]] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    writes: frozenset[int] = frozenset()
    through: frozenset[int] = frozenset()
    dropped: list[Saved] = field(default_factory=list)
    inside: list[tuple[int, ...]] = field(default_factory=list)
    unused: tuple[tuple[Node, int], ...] = ()
    copied: dict[str, str] = field(default_factory=dict)
    recompute: Hashable = ()
    tied: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    marks: tuple[tuple[str, Mapping[str, State]], ...] = ()
    returned: tuple[int, ...] = ()
    calls: frozenset[tuple[str, str]] = frozenset()
    division: Division | None = None

    @cached_property
    def _inside(self) -> dict[str, list[int]]:
        """Module -> the nodes that it and the modules in it run, in order; not for nodes of the model itself."""
        if self.origin is not None:  # the same operations
            return self.origin._inside
        found: dict[str, list[int]] = defaultdict(list)
        above: dict[str, list[str]] = {}
        for index, node in enumerate(self.nodes):
            if node.module not in above:
                parts = node.module.split(".")
                above[node.module] = [".".join(parts[:depth]) for depth in range(1, len(parts) + 1)]
            for name in above[node.module]:
                found[name].append(index)
        return dict(found)

    @cached_property
    def numbers(self) -> frozenset[tuple[str, str]]:
        """(module that made it, module that takes it) of every number, a tensor without dims, that depends on inputs."""
        if self.origin is not None:
            return self.origin.numbers
        flows = {i for i, value in enumerate(self.values) if (value.name or "").startswith("input:")}
        makers: dict[int, str] = {}
        found: set[tuple[str, str]] = set()
        for node in self.nodes:
            if flows.isdisjoint(ref.i for ref in node.ins):
                continue
            made = (makers[ref.i] for ref in node.ins if ref.i in makers)
            found.update((maker, node.module) for maker in made if maker != node.module)
            flows.update(ref.i for ref in node.outs)
            for ref in node.outs:
                value = self.values[ref.i]
                if not value.shape and value.dtype.is_floating_point:
                    makers[ref.i] = node.module
        return frozenset(found)

    def lasts(self, value: int) -> bool:
        """Whether a value is there between steps, and so costs no more where autograd keeps it too."""
        return (self.values[value].name or "").startswith(("param:", "buffer:"))

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd keeps, parameters and buffers excluded, each storage counted once."""
        seen: set[int] = set()
        total = 0
        for item in self.saved:
            if item.root is not None:
                if item.root in seen or self.lasts(item.root):
                    continue
                seen.add(item.root)
            total += item.nbytes
        return total

    def entering(self, module: str) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(shape, bytes) of every floating-point tensor that goes into a module and is no parameter, in order."""
        made: set[int] = set()
        found: dict[int, None] = {}
        for index in self._inside.get(module, ()):
            node = self.nodes[index]
            found.update(dict.fromkeys(r.i for r in node.ins if r.i not in made))
            made.update(r.i for r in node.outs)
        values = (self.values[i] for i in found)
        return tuple(
            (tuple(v.shape), v.nbytes)
            for v in values
            if v.dtype.is_floating_point and not (v.name or "").startswith("param:")
        )


def finish(
    tape: Tape, notes: Sequence[Note], roots: Mapping[int, int], asking: Iterable[int]
) -> dict[int, int]:
    """Drop what no result depends on and find where gradients flow; returns old node index -> new of those kept.

    Args:
        notes: how each node was run.
        roots: value -> the first value of its storage, where that is another one.
        asking: those of the results that require a gradient.
    """
    every = tape.nodes
    kept = _remove_dead_code(tape, roots)
    found = flows(tape.nodes, [notes[k] for k in kept], asking, len(tape.values), roots)
    tape.grad, tape.flows = found.values, found.inputs
    again = [times_again(note.place, found.reached) for note in notes]
    tape.again = [again[k] for k in kept]
    numbers: dict[object, int] = {}
    tape.inside = [
        tuple(numbers.setdefault(spot.here, len(numbers)) for spot in notes[k].place) for k in kept
    ]
    tape.unused = tuple((every[k], again[k]) for k in range(len(every)) if k not in kept)
    return kept


def _remove_dead_code(tape: Tape, roots: Mapping[int, int]) -> dict[int, int]:
    """Drop nodes that no result depends on; returns old index -> new index of those kept."""
    live = set(tape.results)
    # what is written to a part of something (a view of it) is seen by who reads that later
    stored = {roots.get(i, i) for i in live}
    kept: list[int] = []
    writes: list[int] = []
    worth = _worth_knowing(tape, roots)
    for index in range(len(tape.nodes) - 1, -1, -1):
        node = tape.nodes[index]
        if not any(r.i in live for r in node.outs):
            if not node.mutates or not any(roots.get(r.i, r.i) in stored for r in node.outs):
                continue
            if index in worth:
                writes += [index, worth[index]]
        kept.append(index)
        live.update(r.i for r in node.ins)
        stored.update(roots.get(r.i, r.i) for r in node.ins)
    kept.reverse()
    tape.nodes = [tape.nodes[i] for i in kept]
    found = {old: new for new, old in enumerate(kept)}
    tape.writes = frozenset(found[index] for index in writes if index in found)
    tape.through = _written_through(tape, roots)
    return found


def _written_through(tape: Tape, roots: Mapping[int, int]) -> frozenset[int]:
    """Views of what is stored, not of a copy that lies otherwise: something is written through them, or while they are there."""
    maker = {ref.i: index for index, node in enumerate(tape.nodes) for ref in node.outs}
    read: dict[int, int] = {}  # value -> its last reader
    written: dict[int, list[int]] = defaultdict(list)  # first value of a storage -> who writes to it
    for index, node in enumerate(tape.nodes):
        read.update((r.i, index) for r in node.ins)
        if node.mutates:
            written[roots.get(node.ins[0].i, node.ins[0].i)].append(index)
    read.update(dict.fromkeys(tape.results, len(tape.nodes)))
    found: set[int] = set()
    for root, writers in written.items():
        ends = [tape.nodes[k].ins[0].i for k in writers]
        ends += (
            i for i in read if roots.get(i) == root and any(maker.get(i, k) < k < read[i] for k in writers)
        )
        for at in ends:
            while at in roots and at in maker:
                above = maker[at]
                if not tape.nodes[above].mutates:
                    found.add(above)
                at = tape.nodes[above].ins[0].i
    return frozenset(found)


def _worth_knowing(tape: Tape, roots: Mapping[int, int]) -> dict[int, int]:
    """Nodes that write what products make to something that is made for it (zeros, say), and the node that makes it.

    What lies as it is computed is written to where it lies: a plan could only bring it elsewhere, where writes do not reach it.
    """
    maker = {ref.i: index for index, node in enumerate(tape.nodes) for ref in node.outs}
    products: list[bool] = []  # per node, whether it or what it reads is a product
    fresh: list[bool] = []  # per node, whether no value goes into what it makes
    for node in tape.nodes:
        before = [maker[r.i] for r in node.ins if r.i in maker and maker[r.i] < len(products)]
        # a composite, which has no torch operation, says later what it computes
        products.append(bool(node.flops) or node.op is None or any(products[k] for k in before))
        fresh.append(node.op is not None and any(word in node.name for word in _MAKING))
    found: dict[int, int] = {}
    for index, node in enumerate(tape.nodes):
        if node.mutates and any(
            maker[r.i] < index and products[maker[r.i]] for r in node.ins[1:] if r.i in maker
        ):
            base = maker.get(roots.get(node.ins[0].i, node.ins[0].i))
            if base is not None and fresh[base]:
                found[index] = base
    return found
