"""The backward pass of a stage in two halves: gradients of its inputs first, gradients of its weights later.

Autograd computes of a node only what the requested gradients need. The first half requests the stage's inputs. It
records the gradients that arrive at the nodes, on the path to the inputs, where weights come in. The second half
continues from these nodes. A weight that several such nodes lead to, or none, is not deferred: the first half
computes its gradient. So no gradient is lost and none is counted twice, whatever the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from meshwright_pipeline._torch import leaf_variable

Tensor = torch.Tensor


@dataclass
class _WeightNode:
    """A node on the path to the inputs where weights come in: leaves that only it leads to, and gradients of its results."""

    node: Node
    weights: list[Tensor]
    gradients: tuple[Tensor | None, ...] = ()

    def record(self, gradients: tuple[Tensor | None, ...]) -> None:
        """A hook on the node."""
        self.gradients = gradients


@dataclass
class SplitBackward:
    """The two halves of the backward pass of `outputs`. `inputs`: leaves of the first half; without any, the second does all."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    _gradients: Sequence[Tensor] | None = None
    _nodes: list[_WeightNode] = field(default_factory=list)

    def input_gradients(self, gradients: Sequence[Tensor] | None) -> None:
        """Accumulate gradients of the inputs, and of weights that cannot be deferred. `gradients`: of the outputs; None for 1."""
        self._gradients = gradients
        if not self.inputs:
            return
        self._nodes, at_once = _weight_nodes(self.outputs, self.inputs)
        hooks = [weight_node.node.register_prehook(weight_node.record) for weight_node in self._nodes]
        try:
            wanted = [*self.inputs, *at_once]
            torch.autograd.backward(self.outputs, gradients, retain_graph=True, inputs=wanted)
        finally:
            for hook in hooks:
                hook.remove()

    def weight_gradients(self) -> None:
        """Accumulate the gradients of all other weights."""
        if not self.inputs:
            torch.autograd.backward(self.outputs, self._gradients)
            return
        for weight_node in self._nodes:
            recorded = [(place, g) for place, g in enumerate(weight_node.gradients) if g is not None]
            if recorded:
                edges = [GradientEdge(weight_node.node, place) for place, _ in recorded]
                torch.autograd.backward(edges, [g for _, g in recorded], inputs=weight_node.weights)


def _weight_nodes(outs: Iterable[Tensor], ins: Iterable[Tensor]) -> tuple[list[_WeightNode], list[Tensor]]:
    """The nodes where weights come in, in the order of the graph, and the leaves that cannot be deferred."""
    roots = list(dict.fromkeys(get_gradient_edge(output).node for output in outs))
    ends = {get_gradient_edge(leaf).node for leaf in ins}
    path = _nodes_leading_to(roots, ends)
    # leaf -> the nodes of the path that lead to it by edges off the path
    sources: dict[Node, list[Node]] = {}
    at_once: dict[Node, None] = {}
    for node in path:
        for following in _next(node):
            if following not in path and following not in ends:
                for leaf in _leaves(following):
                    if node not in sources.setdefault(leaf, []):
                        sources[leaf].append(node)
    for root in roots:
        if root not in path:
            at_once.update(dict.fromkeys(_leaves(root)))
    weight_nodes: dict[Node, _WeightNode] = {}
    for leaf, nodes in sources.items():
        if leaf in at_once:
            continue
        if len(nodes) > 1:
            at_once[leaf] = None
            continue
        weight_node = weight_nodes.setdefault(nodes[0], _WeightNode(nodes[0], []))
        weight_node.weights.extend(_variables([leaf]))
    return list(weight_nodes.values()), _variables(at_once)


def _nodes_leading_to(roots: Iterable[Node], ends: set[Node]) -> dict[Node, None]:
    """The nodes from which one of `ends` is reached, without these, each after those that it leads to."""
    leads: dict[Node, bool] = dict.fromkeys(ends, True)
    nodes: dict[Node, None] = {}
    stack: list[tuple[Node, bool]] = [(root, False) for root in roots]
    while stack:
        node, expanded = stack.pop()
        if expanded:
            leads[node] = any(leads[following] for following in _next(node))
            if leads[node]:
                nodes[node] = None
        elif node not in leads:
            leads[node] = False
            stack.append((node, True))
            stack.extend((following, False) for following in _next(node) if following not in leads)
    return {node: None for node in nodes if node not in ends}


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
    return [variable for variable in map(leaf_variable, leaves) if variable is not None]
