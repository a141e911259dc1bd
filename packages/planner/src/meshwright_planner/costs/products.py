"""What products cost: operations of a recorded node, forward and backward, and the tensors that it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright_dtensor.rules.base import NodeView
from meshwright_dtensor.rules.composite import Composite
from meshwright_dtensor.trace import Node, Ref, Value
from meshwright_planner.costs.kinds import base_name

_ADDING = frozenset({"addmm", "baddbmm"})
"""Products whose first tensor is only added."""


def by_name(composites: Mapping[Callable[..., Any], Composite]) -> dict[str, Composite]:
    """Name of a node -> the composite that it is of."""
    return {composite.name: composite for composite in composites.values()}


def forward_flops(node: Node, values: Sequence[Value], composites: Mapping[str, Composite]) -> float:
    """Operations of the forward pass; a composite, which has no torch operation, says its own where they are not known."""
    composite = composites.get(node.name) if node.op is None and not node.flops else None
    return node.flops if composite is None else float(composite.flops(NodeView.of(node, values, 1)))


def operands(node: Node) -> list[Ref]:
    """What a product multiplies: neither a bias, which is added, nor a mask."""
    if base_name(node) in _ADDING:
        return node.ins[1:3]
    return node.ins[:3] if node.name == "sdpa" else node.ins[:2]


def backward_flops(node: Node, values: Sequence[Value], grad: Sequence[bool], flops: float) -> float:
    """Operations of the backward pass: a product as large as the forward's for each operand that gets a gradient.

    `flops`: of the forward. What fused attention computes again of the forward is not among them.
    """
    if not flops or not any(grad[ref.i] for ref in node.outs):
        return 0.0
    wanted = [grad[ref.i] for ref in operands(node)]
    if node.name != "sdpa":
        return flops * sum(wanted)
    query, _, value = (values[ref.i].shape[-1] for ref in node.ins[:3])
    scores = flops * query / (query + value)  # of the two products of the forward, the first
    by_query, by_key, by_value = wanted
    # the gradient of the scores is needed for either of those that made them
    return scores * (by_query + by_key) + (flops - scores) * ((by_query or by_key) + by_value)
