"""The backward pass of a stage in two halves: gradients of what it received first, those of its weights later.

Autograd computes of a node only what the gradients that are asked for need. The first half asks for the stage's inputs, and
takes down what arrives at the nodes of that path where weights come in; the second half goes on from there. A weight
that more than one such node leads to, or none, is not put off: its gradient belongs to the first half. So nothing is lost,
whatever the graph looks like, and nothing is counted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node

from meshwright_pipeline._torch import leaf_variable, node_of

Tensor = torch.Tensor


@dataclass
class _Turn:
    """A node of the path to the inputs where weights come in.

    Attributes:
        node: the node.
        weights: the leaves that only it leads to.
        arrived: gradients of its results, once the first half has come by.
    """

    node: Node
    weights: list[Tensor]
    arrived: tuple[Tensor | None, ...] = ()

    def take(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A hook on the node."""
        self.arrived = gradients


@dataclass
class Halves:
    """The two halves of one backward pass.

    Args:
        outputs: what is differentiated.
        inputs: the leaves that the first half is for; without any, all is left to the second half.
    """

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    _given: Sequence[Tensor] | None = None
    _turns: list[_Turn] = field(default_factory=list)

    def first(self, gradients: Sequence[Tensor] | None) -> None:
        """Add up gradients of the inputs, and of weights that cannot be put off; `gradients`: of the outputs, None for 1."""
        self._given = gradients
        if not self.inputs:
            return
        self._turns, at_once = _turns(self.outputs, self.inputs)
        hooks = [turn.node.register_prehook(turn.take) for turn in self._turns]
        try:
            torch.autograd.backward(
                self.outputs, gradients, retain_graph=True, inputs=[*self.inputs, *at_once]
            )
        finally:
            for hook in hooks:
                hook.remove()

    def second(self) -> None:
        """Add up the gradients of all other weights."""
        if not self.inputs:
            torch.autograd.backward(self.outputs, self._given)
            return
        for turn in self._turns:
            known = [(place, g) for place, g in enumerate(turn.arrived) if g is not None]
            if known:
                edges = [GradientEdge(turn.node, place) for place, _ in known]
                torch.autograd.backward(edges, [g for _, g in known], inputs=turn.weights)


def _turns(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> tuple[list[_Turn], list[Tensor]]:
    """The nodes where weights come in, in the order in which the graph is walked, and the leaves that cannot wait."""
    roots = list(dict.fromkeys(node_of(output) for output in outputs))
    ends = {node_of(leaf) for leaf in inputs}
    path = _leading_to(roots, ends)
    leads: dict[Node, list[Node]] = {}  # leaf -> the nodes of the path that lead to it by ways off the path
    at_once: dict[Node, None] = {}
    for node in path:
        for beside in _next(node):
            if beside not in path and beside not in ends:
                for leaf in _leaves(beside):
                    if node not in leads.setdefault(leaf, []):
                        leads[leaf].append(node)
    for root in roots:
        if root not in path:
            at_once.update(dict.fromkeys(_leaves(root)))
    found: dict[Node, _Turn] = {}
    for leaf, nodes in leads.items():
        if leaf in at_once:
            continue
        if len(nodes) > 1:
            at_once[leaf] = None
            continue
        turn = found.setdefault(nodes[0], _Turn(nodes[0], []))
        turn.weights.extend(_variables([leaf]))
    return list(found.values()), _variables(at_once)


def _leading_to(roots: Iterable[Node], ends: set[Node]) -> dict[Node, None]:
    """The nodes from which one of `ends` is reached, these left out, each behind those that it leads to."""
    leads: dict[Node, bool] = dict.fromkeys(ends, True)
    found: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, seen = stack.pop()
        if seen:
            leads[node] = any(leads[following] for following in _next(node))
            if leads[node]:
                found[node] = None
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((following, False) for following in _next(node) if following not in leads)
    return {node: None for node in found if node not in ends}


def _leaves(start: Node) -> list[Node]:
    """The leaves that `start` leads to, itself included."""
    seen: dict[Node, None] = {start: None}
    stack = [start]
    while stack:
        for following in _next(stack.pop()):
            if following not in seen:
                seen[following] = None
                stack.append(following)
    return [node for node in seen if leaf_variable(node) is not None]


def _next(node: Node) -> list[Node]:
    return [following for following, _ in node.next_functions if following is not None]


def _variables(leaves: Iterable[Node]) -> list[Tensor]:
    return [found for found in map(leaf_variable, leaves) if found is not None]
