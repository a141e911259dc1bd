"""What products cost: operations of a recorded node, forward and backward, and the tensors that it multiplies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshwright_dtensor.rules.composites.base import Composite
from meshwright_dtensor.rules.node import NodeView
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_planner import _torch
from meshwright_planner.trace.op_kinds import ATTENTION, base_name

_ADDING = frozenset({"addmm", "baddbmm"})
"""Products whose first tensor is only added."""


_RECURRENT = frozenset({"mkldnn_rnn_layer", "_cudnn_rnn"})
"""Layers of which the backward pass makes every gradient, whoever asks."""


def by_name(composites: Mapping[Callable[..., Any], Composite]) -> dict[str, Composite]:
    """Name of a node -> the composite that it is of."""
    return {composite.name: composite for composite in composites.values()}


def forward_flops(node: Node, values: Sequence[Value], composites: Mapping[str, Composite]) -> float:
    """Operations of the forward pass; a composite, which has no torch operation, says its own where they are not known.

    Of causal attention the half that is not masked counts.
    """
    composite = composites.get(node.name) if node.op is None and not node.flops else None
    if composite is not None:
        return float(composite.flops(NodeView.of(node, values, 1)))
    causal = node.op is not None and base_name(node) in ATTENTION and node.flops
    if causal and _torch.argument(node.op, node.args, "is_causal"):
        return node.flops / 2
    return node.flops


def operands(node: Node) -> slice:
    """Which of its tensor inputs a product multiplies: neither a bias, which is added, nor a mask."""
    if base_name(node) in _ADDING:
        return slice(1, 3)
    return slice(0, 3 if base_name(node) in ATTENTION else 2)


def gradients_made(node: Node, flows: Sequence[bool]) -> int:
    """How many products as large as the forward's a product's backward pass is; `flows`: as in Tape.flows."""
    if base_name(node) in _RECURRENT:
        return 2 * any(flows)
    return sum(flows[operands(node)])


def backward_flops(node: Node, values: Sequence[Value], flows: Sequence[bool], flops: float) -> float:
    """Operations of the backward pass: a product as large as the forward's for each operand that gets a gradient.

    `flows`: of the node, as in Tape.flows. `flops`: of the forward. What fused attention computes again of the forward is
    not among them.
    """
    wanted = flows[operands(node)]
    if base_name(node) not in ATTENTION:
        return flops * gradients_made(node, flows)
    if not flops or not any(wanted):
        return 0.0
    query, _, value = (values[ref.i].shape[-1] for ref in node.ins[:3])
    scores = flops * query / (query + value)  # of the two products of the forward, the first
    by_query, by_key, by_value = wanted
    # the gradient of the scores is needed for either of those that made them
    return scores * (by_query + by_key) + (flops - scores) * ((by_query or by_key) + by_value)
