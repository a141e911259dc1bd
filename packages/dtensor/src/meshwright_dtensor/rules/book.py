"""The rule book: which rows are legal for a node, from first-party rules and plugins, whose rows are checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from meshwright_dtensor.errors import PluginError, UsageError
from meshwright_dtensor.mesh.context import MeshContext
from meshwright_dtensor.rules import node as nodes
from meshwright_dtensor.rules.composites.base import Composite
from meshwright_dtensor.rules.composites.batch_norm import BatchNorm
from meshwright_dtensor.rules.composites.cross_entropy import CrossEntropy
from meshwright_dtensor.rules.composites.dropout import Dropout
from meshwright_dtensor.rules.composites.embedding import Embedding, EmbeddingBag
from meshwright_dtensor.rules.composites.linear import Linear
from meshwright_dtensor.rules.composites.sdpa import ScaledDotProductAttention
from meshwright_dtensor.rules.lift import Known, extended
from meshwright_dtensor.rules.node import NodeView, RuleEntry, Strategy
from meshwright_dtensor.rules.ops import factories, indexing, layers, matmul, pointwise, reductions, views
from meshwright_dtensor.rules.verify_row import check
from meshwright_dtensor.trace.graph import Ref


class RuleBook:
    """Rules, `composites` by torch function, and a cache of the rows of each node."""

    def __init__(self, rules: Mapping[str, RuleEntry], composites: Iterable[Composite] = ()) -> None:
        """``rules``: ``"aten.op"`` or ``"aten.op.overload"`` -> rule; rows of source "plugin" are checked."""
        self._rules = dict(rules)
        for op, entry in self._rules.items():
            if entry.source not in nodes.SOURCES:
                text = f"the rule of {op} has source {entry.source!r}; it must be one of {', '.join(sorted(nodes.SOURCES))}"
                raise UsageError(text)
        installed = list(composites)
        self.composites = {function: composite for composite in installed for function in composite.functions}
        self._by_name = {composite.name: composite for composite in installed}
        self._memory: dict[Any, tuple[Strategy, ...]] = {}

    @classmethod
    def first_party(cls) -> RuleBook:
        """The rules and composites of this package, and no plugins."""
        return cls(first_party_rules(), first_party_composites())

    @classmethod
    def default(cls) -> RuleBook:
        """First-party rules and those that plugins register through ``meshwright_op_rules``.

        The target of an OpRuleSpec is a mapping of op names to rules (a rule takes a NodeView and yields rows), a
        Composite, or a list of such.
        """
        from meshwright_dtensor.plugins import discover

        rules, composites = first_party_rules(), first_party_composites()
        for name, registered in discover().op_rules().items():
            for part in parts_of(registered.load()):
                if isinstance(part, Composite):
                    composites.append(part)
                elif isinstance(part, Mapping):
                    rules.update({op: RuleEntry(rule, "plugin") for op, rule in part.items()})
                else:
                    raise PluginError(
                        f"op rule {name!r} loads {type(part).__name__}: make it a mapping of op names to rules, or a Composite"
                    )
        return cls(rules, composites)

    def composite(self, name: str) -> Composite:
        """The composite whose nodes are called ``name``."""
        return self._by_name[name]

    def strategies(self, view: NodeView) -> list[Strategy]:
        """Legal raw rows over R, P and dims; the replicated row comes first."""
        key = _key(view)
        if key not in self._memory:
            self._memory[key] = tuple(self._find(view))
        return list(self._memory[key])

    def lifted(self, view: NodeView, rows: list[Strategy], ins: Known, outs: Known = ()) -> list[Strategy]:
        """``rows``, and the rows for inputs (and outputs) in these states: see :func:`~lift.extended`."""
        composite = self._by_name.get(view.node.name) if view.node.op is None else None
        if composite is None:
            return rows + extended(view, rows, ins, outs)
        return rows + extended(view, rows, ins, outs, lambda row: composite.permutes(view, row))

    def _find(self, view: NodeView) -> list[Strategy]:
        node = view.node
        if node.op is None:
            return self._by_name[node.name].strategies(view)
        if nodes.is_random(node) or not node.outs:
            return [nodes.replicate(view)]
        entry = self._rules.get(node.name) or self._rules.get(nodes.base_name(node.name))
        if entry is None and torch.Tag.pointwise in node.op.tags:
            # torch's tags are tested; the tag of a custom op is checked
            tested = node.op.namespace in ("aten", "prims")
            entry = RuleEntry(pointwise.pointwise, "pointwise" if tested else "plugin")
        if entry is None:
            return [nodes.replicate(view)]
        if entry.source == "plugin":
            first, *others = nodes.finish(view, entry.rule(view), entry.source)
            return [first, *(row for row in others if check(view, row))]
        return nodes.finish(view, entry.rule(view), entry.source, entry.complete)


def rule_book(context: MeshContext) -> RuleBook:
    """The first-party rules and those of plugins, for calls on this mesh."""
    return context.cached(_default)


def _default(context: MeshContext) -> RuleBook:
    return RuleBook.default()


def first_party_rules() -> dict[str, RuleEntry]:
    """op name -> rule."""
    modules = (views, pointwise, reductions, matmul, layers, indexing, factories)
    return {op: entry for module in modules for op, entry in module.RULES.items()}


def first_party_composites() -> list[Composite]:
    """linear, sdpa, embedding, embedding_bag, cross_entropy, dropout, batch_norm."""
    kinds = (Linear, ScaledDotProductAttention, Embedding, EmbeddingBag, CrossEntropy, Dropout, BatchNorm)
    return [kind() for kind in kinds]


def parts_of(target: Any) -> Iterator[Any]:
    """The mappings and composites in the target of an OpRuleSpec."""
    if isinstance(target, (list, tuple)):
        for part in target:
            yield from parts_of(part)
    else:
        yield target() if isinstance(target, type) and issubclass(target, Composite) else target


def _key(view: NodeView) -> Any:
    """What a node's rows depend on: op, arguments, shapes, dtypes, axis size."""
    seen: dict[Ref, int] = {}
    node = view.node
    return (
        node.name,
        view.n,
        view.attention,
        _frozen(node.args, view, seen),
        _frozen(node.kwargs, view, seen),
        tuple(view.out_shapes),
        tuple(view.dtype(r) for r in node.outs),
    )


def _frozen(x: Any, view: NodeView, seen: dict[Ref, int]) -> Any:
    # not a nested function: a recursive closure is a reference cycle, which lives until garbage collection
    if isinstance(x, Ref):
        return ("tensor", seen.setdefault(x, len(seen)), view.shape(x), view.dtype(x))
    if isinstance(x, (list, tuple)):
        return tuple(_frozen(y, view, seen) for y in x)
    if isinstance(x, dict):
        return tuple((k, _frozen(v, view, seen)) for k, v in x.items())
    return (type(x), x if getattr(x, "__hash__", None) else repr(x))
