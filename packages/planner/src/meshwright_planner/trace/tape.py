"""The tape: one recorded eager run of a model (`trace/recorder/record.py` makes it)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from meshwright_dtensor.propagate.predict import PredictedMove
from meshwright_dtensor.sharding.states import State
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_planner.trace.grad_flow import Note, flows
from meshwright_planner.trace.user_checkpoints import times_again

_CREATION_OPS = ("zeros", "empty", "ones", "full")
"""Parts of the names of operations that create tensors without computing values."""


Roots = Mapping[int, int]
"""Value -> the first value of its storage, if that is another."""


class Saved(NamedTuple):
    """A tensor that autograd saves for the backward of one node.

    Args:
        node: index of the node whose input or output it is: the one that saves it, or the one that made it just before.
        root: index of the first value of its storage; None when the recorder never saw it (inside a composite).
        value: index of the value itself; None likewise.
        output: whether it is one of the node's own outputs.
        nbytes: its size.
        by: index of the node that saves it.
    """

    node: int
    root: int | None
    value: int | None
    output: bool
    nbytes: int
    by: int


@dataclass(frozen=True)
class Division:
    """What a data rank does in addition to computing on its own rows.

    Args:
        moved: the collectives of one forward and backward for cross-row interactions, each with its count.
        notes: for users.
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
    """The operations of one run, without dead code.

    Args:
        values: `values[i].name` names a parameter, buffer or input.
        nodes: the operations that the results depend on, in order.
        results: the loss, else all floating-point outputs.
        grad: per value, whether it receives a gradient.
        flows: per node and tensor input, whether the input receives a gradient from the node.
        again: per node, how often the model's own checkpoints recompute it in the backward pass.
        writes: nodes that write products into a tensor created for it (zeros, say), and the nodes that create it.
        through: views that are written through.
        saved: what autograd saves.
        dropped: tensors that the model's own checkpoints drop, and have again during recomputation.
        inside: per node, numbers of the checkpoints that it runs in.
        recorded: number of operations before dead code was removed.
        unused: the dead code, which runs all the same: each operation, and how often it is recomputed (see `again`).
        real: the run was on real tensors because the model reads data.
        scalar: the result is a scalar loss.
        parameters: name -> value of every distinct parameter.
        copied: module that was not run -> the module of the same family that was.
        recompute: recompute rules that are applied to `saved`.
        tied: first name -> other names of every parameter that has several.
        marks: (module, mesh axis -> state) of each activation that the model marks, where it was run.
        returned: every value that the model returns, in any container.
        calls: (calling module, called module) of every call of a module.
        origin: the recorded tape that this one differs from in sizes only; None if it was recorded itself.
        division: of a data rank with cross-row interactions; None if it computes on its own rows only.
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
    def module_nodes(self) -> dict[str, list[int]]:
        """Module -> the nodes that it and the modules in it run, in order; without the model itself."""
        # the same operations
        if self.origin is not None:
            return self.origin.module_nodes
        nodes_of: dict[str, list[int]] = defaultdict(list)
        above: dict[str, list[str]] = {}
        for index, node in enumerate(self.nodes):
            if node.module not in above:
                above[node.module] = list(accumulate(node.module.split("."), "{}.{}".format))
            for name in above[node.module]:
                nodes_of[name].append(index)
        return dict(nodes_of)

    @cached_property
    def numbers(self) -> frozenset[tuple[str, str]]:
        """(producing module, consuming module) of every scalar tensor that depends on inputs."""
        if self.origin is not None:
            return self.origin.numbers
        flows = {i for i, value in enumerate(self.values) if (value.name or "").startswith("input:")}
        makers: dict[int, str] = {}
        edges: set[tuple[str, str]] = set()
        for node in self.nodes:
            if flows.isdisjoint(ref.i for ref in node.ins):
                continue
            made = (makers[ref.i] for ref in node.ins if ref.i in makers)
            edges.update((maker, node.module) for maker in made if maker != node.module)
            flows.update(ref.i for ref in node.outs)
            for ref in node.outs:
                value = self.values[ref.i]
                if not value.shape and value.dtype.is_floating_point:
                    makers[ref.i] = node.module
        return frozenset(edges)

    def lasts(self, value: int) -> bool:
        """Whether a value is a parameter or buffer, which costs nothing more when autograd saves it."""
        return (self.values[value].name or "").startswith(("param:", "buffer:"))

    @property
    def activation_bytes(self) -> int:
        """Bytes that autograd saves, parameters and buffers excluded, each storage counted once."""
        hidden = sum(item.nbytes for item in self.saved if item.root is None)
        storages = {item.root: item.nbytes for item in reversed(self.saved) if item.root is not None}
        return hidden + sum(nbytes for root, nbytes in storages.items() if not self.lasts(root))

    def entering(self, module: str) -> tuple[tuple[tuple[int, ...], int], ...]:
        """(shape, bytes) of every floating-point input of a module that is no parameter, in order."""
        made: set[int] = set()
        inputs: dict[int, None] = {}
        for index in self.module_nodes.get(module, ()):
            node = self.nodes[index]
            inputs.update(dict.fromkeys(r.i for r in node.ins if r.i not in made))
            made.update(r.i for r in node.outs)
        values = (self.values[i] for i in inputs if self.values[i].dtype.is_floating_point)
        return tuple((tuple(v.shape), v.nbytes) for v in values if not (v.name or "").startswith("param:"))


def finish(tape: Tape, notes: Sequence[Note], roots: Roots, asking: Iterable[int]) -> dict[int, int]:
    """Drop dead code and find where gradients flow; returns old node index -> new index of the nodes kept.

    `notes`: how each node was run; `asking`: the results that require a gradient.
    """
    recorded_nodes = tape.nodes
    kept = _remove_dead_code(tape, roots)
    run = [notes[k] for k in kept]
    tape.grad, tape.flows, reached = flows(tape.nodes, run, asking, len(tape.values), roots)
    again = [times_again(note.place, reached) for note in notes]
    tape.again = [again[k] for k in kept]
    numbers: dict[object, int] = {}
    places = (note.place for note in run)
    tape.inside = [tuple(numbers.setdefault(s.checkpoint, len(numbers)) for s in place) for place in places]
    tape.unused = tuple((recorded_nodes[k], again[k]) for k in range(len(recorded_nodes)) if k not in kept)
    return kept


def _remove_dead_code(tape: Tape, roots: Roots) -> dict[int, int]:
    """Drop nodes that no result depends on; returns old index -> new index of those kept."""
    live = set(tape.results)
    # a write to a view is seen by later readers of the storage
    stored = {roots.get(i, i) for i in live}
    kept: list[int] = []
    writes: list[int] = []
    product_writes = _product_writes(tape, roots)
    for index in range(len(tape.nodes) - 1, -1, -1):
        node = tape.nodes[index]
        if not any(r.i in live for r in node.outs):
            if not node.mutates or not any(roots.get(r.i, r.i) in stored for r in node.outs):
                continue
            if index in product_writes:
                writes += [index, product_writes[index]]
        kept.append(index)
        live.update(r.i for r in node.ins)
        stored.update(roots.get(r.i, r.i) for r in node.ins)
    kept.reverse()
    tape.nodes = [tape.nodes[i] for i in kept]
    new_index = {old: new for new, old in enumerate(kept)}
    tape.writes = frozenset(new_index[index] for index in writes if index in new_index)
    tape.through = _written_through(tape, roots)
    return new_index


def _written_through(tape: Tape, roots: Roots) -> frozenset[int]:
    """Views of a storage that is written through them, or while they are in use.

    For these a view of a converted copy would be wrong.
    """
    # an operation in place gives a value that was there before
    maker: dict[int, int] = {}
    for index, node in enumerate(tape.nodes):
        for ref in node.outs:
            if all(ref.i != given.i for given in node.ins):
                maker.setdefault(ref.i, index)
    # value -> its last reader
    read: dict[int, int] = {}
    # first value of a storage -> nodes that write to it
    written: dict[int, list[int]] = defaultdict(list)
    for index, node in enumerate(tape.nodes):
        read.update((r.i, index) for r in node.ins)
        if node.mutates:
            written[roots.get(node.ins[0].i, node.ins[0].i)].append(index)
    read.update(dict.fromkeys(tape.results, len(tape.nodes)))
    views: set[int] = set()
    for root, writers in written.items():
        ends = [tape.nodes[k].ins[0].i for k in writers]
        viewed = (i for i in read if roots.get(i) == root)
        ends += (i for i in viewed if any(maker.get(i, k) < k < read[i] for k in writers))
        for at in ends:
            below = len(tape.nodes)
            # towards the first value of the storage: each is made earlier
            while at in roots and maker.get(at, len(tape.nodes)) < below:
                below = above = maker[at]
                if not tape.nodes[above].mutates:
                    views.add(above)
                at = tape.nodes[above].ins[0].i
    return frozenset(views)


def _product_writes(tape: Tape, roots: Roots) -> dict[int, int]:
    """Nodes that write products into a tensor created for it (zeros, say) -> the node that creates it.

    Both keep the layout of the product: the write would not reach a converted copy.
    """
    maker = {ref.i: index for index, node in enumerate(tape.nodes) for ref in node.outs}
    # per node, whether it or an input of it is a product
    products: list[bool] = []
    # per node, whether it creates a tensor
    fresh: list[bool] = []
    for node in tape.nodes:
        before = [maker[r.i] for r in node.ins if r.i in maker and maker[r.i] < len(products)]
        # the FLOPs of a composite are not known yet
        products.append(bool(node.flops) or node.op is None or any(products[k] for k in before))
        fresh.append(node.op is not None and any(word in node.name for word in _CREATION_OPS))
    bases: dict[int, int] = {}
    for index, node in enumerate(tape.nodes):
        if not node.mutates:
            continue
        makers = (maker[r.i] for r in node.ins[1:] if r.i in maker)
        if any(k < index and products[k] for k in makers):
            base = maker.get(roots.get(node.ins[0].i, node.ins[0].i))
            if base is not None and fresh[base]:
                bases[index] = base
    return bases
