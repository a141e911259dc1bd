"""A tape with repeated blocks merged: representative nodes and values, each with its multiplicity.

Sibling modules that do the same one after the other (layer 0, layer 1, ...) become one representative.  The edges
between consecutive copies stay: the representative reads its own output too, which makes the state at a block
boundary a fixed point.  Parallel siblings (k_proj and v_proj) are never merged: they may be placed differently.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, TypeVar

from meshwright_dtensor.trace.graph import Ref
from meshwright_dtensor.utils.memo import Memo
from meshwright_planner.trace.tape import Tape

T = TypeVar("T")
Edge = tuple[int, int, int]
"""(value, node, position among the node's tensor inputs), value and node being representatives."""


@dataclass
class Quotient:
    """The nodes, values and edges that a search works on.

    Args:
        nodes: representative nodes, in order.
        node_count: representative -> number of nodes it represents.
        value_count: representative value -> number of values it represents.
        edges: edge -> the values that flow along its copies, without repeats.
        groups: names of the modules that were merged, representative first.
        memo: what follows from the operations alone, whatever their sizes.
    """

    nodes: list[int] = field(default_factory=list)
    node_count: Counter[int] = field(default_factory=Counter)
    value_count: Counter[int] = field(default_factory=Counter)
    edges: dict[Edge, tuple[int, ...]] = field(default_factory=dict)
    groups: list[list[str]] = field(default_factory=list)
    _node_of: dict[int, int] = field(default_factory=dict)
    _value_of: dict[int, int] = field(default_factory=dict)
    memo: Memo = field(default_factory=Memo)

    def node(self, index: int) -> int:
        """The representative of node `index`."""
        return self._node_of.get(index, index)

    def value(self, index: int) -> int:
        """The representative of value `index`."""
        return self._value_of.get(index, index)

    def once_for(self, tape: Tape, key: Hashable, make: Callable[[Tape], T]) -> T:
        """`memo.once`, for a tape and all that differ from it in sizes only: others may save other tensors."""
        like = tape if tape.origin is None else tape.origin
        # the result keeps the tape alive, so that its id stays unique
        _, result = self.memo.once((key, id(like)), lambda: (like, make(like)))
        return result


def quotient(tape: Tape, merge: bool = True) -> Quotient:
    """Merge the repeated blocks of `tape`; with `merge=False` everything is its own representative."""
    result = Quotient()
    if merge:
        _Merger(tape, result).visit("")
        # a representative may have been merged into another later
        for table in (result._node_of, result._value_of):
            for index, other in table.items():
                while other in table:
                    other = table[other]
                table[index] = other
    produced = {r.i for node in tape.nodes for r in node.outs}
    outside: set[int] = set()
    flows: dict[Edge, dict[int, None]] = defaultdict(dict)
    for index, node in enumerate(tape.nodes):
        canon = result.node(index)
        result.node_count[canon] += 1
        for ref in node.outs:
            result.value_count[result.value(ref.i)] += 1
        for position, ref in enumerate(node.ins):
            flows[result.value(ref.i), canon, position][ref.i] = None
            if ref.i not in produced and ref.i not in outside:
                outside.add(ref.i)
                result.value_count[result.value(ref.i)] += 1
    result.nodes = sorted(result.node_count)
    result.edges = {edge: tuple(values) for edge, values in flows.items()}
    return result


@dataclass
class _Block:
    name: str
    # values that come from outside, in order of first use
    outside: list[int]
    inside: set[int]


class _Merger:
    def __init__(self, tape: Tape, result: Quotient) -> None:
        self.tape, self.result = tape, result
        self._signatures: dict[str, Any] = {}
        self.span: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(tape.nodes):
            for name in accumulate(node.module.split("."), "{}.{}".format) if node.module else ():
                self.span[name].append(index)
        self.children: dict[str, list[str]] = defaultdict(list)
        for name in sorted(self.span, key=lambda n: (self.span[n][0], n.count("."))):
            self.children[name.rpartition(".")[0]].append(name)

    def visit(self, parent: str) -> None:
        families: dict[Any, list[_Block]] = defaultdict(list)
        for name in self.children.get(parent, []):
            info = self.tape.modules.get(name)
            # a container (ModuleList) runs nothing itself, so it has no info of interest but may hold blocks
            if info is not None and not info.leaf and info.parameters >= 2:
                signature, block = self._signature(name)
                families[signature].append(block)
        merged: set[str] = set()
        for family in families.values():
            if len(family) > 1 and self._chained(family[0], family[1]):
                self._merge(family)
                merged.update(block.name for block in family[1:])
        for name in self.children.get(parent, []):
            if name not in merged:
                self.visit(name)

    def _signature(self, name: str) -> tuple[Any, _Block]:
        # a data rank may compute some copies of a block for all rows, and others not
        source = self.tape.copied.get(name) if self.tape.division is None else None
        if source in self._signatures and len(self.span[source]) == len(self.span[name]):
            return self._signatures[source], self._copied_block(name)
        self._signatures[name], block = self._signed_block(name)
        return self._signatures[name], block

    def _copied_block(self, name: str) -> _Block:
        """The block of a module that was not run, because another of the same signature was."""
        prefix = f"param:{name}."
        inside: set[int] = set()
        outside: dict[int, None] = {}
        for index in self.span[name]:
            node = self.tape.nodes[index]
            for ref in node.ins:
                if ref.i not in inside and not (self.tape.values[ref.i].name or "").startswith(prefix):
                    outside[ref.i] = None
            inside.update(ref.i for ref in node.outs)
        return _Block(name, list(outside), inside)

    def _signed_block(self, name: str) -> tuple[Any, _Block]:
        values, prefix = self.tape.values, f"param:{name}."
        inside: dict[int, tuple[int, int]] = {}
        outside: dict[int, int] = {}
        parts: list[Any] = []

        def label(x: Ref) -> str:
            value = values[x.i]
            if x.i in inside:
                return f"in{inside[x.i]}"
            if value.name is not None and value.name.startswith(prefix):
                return f"p{value.name[len(prefix) :]}{value.shape}{value.dtype}"
            order = outside.setdefault(x.i, len(outside))
            return f"out{order}{value.shape}{value.dtype}{self.tape.grad[x.i]}"

        for position, index in enumerate(self.span[name]):
            node = self.tape.nodes[index]
            call = node.call and (node.call.module[len(name) :], node.call.function, node.call.occurrence)
            arguments = _described(node.args, label), _described(node.kwargs, label)
            goes = self.tape.flows[index], self.tape.again[index]
            parts.append((node.name, node.module[len(name) :], call, *goes, *arguments))
            for k, ref in enumerate(node.outs):
                inside[ref.i] = (position, k)
        return tuple(parts), _Block(name, list(outside), set(inside))

    def _chained(self, first: _Block, second: _Block) -> bool:
        """Whether an input of `second` depends on `first`."""
        dependent = set(first.inside)
        start, stop = self.span[first.name][0], self.span[second.name][-1]
        for node in self.tape.nodes[start : stop + 1]:
            if any(r.i in dependent for r in node.ins):
                dependent.update(r.i for r in node.outs)
        return any(value in dependent for value in second.outside)

    def _merge(self, family: list[_Block]) -> None:
        values, nodes, base = self.tape.values, self.tape.nodes, family[0]
        self.result.groups.append([block.name for block in family])
        for block in family[1:]:
            for first, other in zip(self.span[base.name], self.span[block.name]):
                self.result._node_of[other] = first
                a, b = nodes[first], nodes[other]
                for x, y in zip(a.outs, b.outs):
                    self.result._value_of[y.i] = x.i
                for i, j in ((x.i, y.i) for x, y in zip(a.ins, b.ins) if x.i != y.i):
                    if _is_own(values[j].name, block.name) and _is_own(values[i].name, base.name):
                        self.result._value_of[j] = i


def _described(tree: Any, label: Callable[[Ref], str]) -> Any:
    """Recorded arguments, in order, in a form that can be compared and hashed."""
    if isinstance(tree, Ref):
        return label(tree)
    if isinstance(tree, (tuple, list)):
        return (type(tree).__name__, *[_described(x, label) for x in tree])
    if isinstance(tree, dict):
        return ("dict", *[(key, _described(x, label)) for key, x in tree.items()])
    return repr(tree)


def _is_own(name: str | None, module: str) -> bool:
    """Whether a value is a parameter or buffer of `module` or of a module inside it."""
    return name is not None and name.partition(":")[2].startswith(f"{module}.")


def carried(tape: Tape, result: Quotient) -> list[int]:
    """Representative values that flow from a block to its next copy: activations with a gradient, of three dims or more."""
    maker = {result.value(r.i): k for k in result.nodes for r in tape.nodes[k].outs}
    values = dict.fromkeys(value for value, node, _ in result.edges if maker.get(value, -1) >= node)
    return [value for value in values if tape.grad[value] and len(tape.values[value].shape) > 2]
