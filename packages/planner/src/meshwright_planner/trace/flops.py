"""FLOPs of a recorded node, forward and backward, and the tensors that it multiplies."""

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
"""Layers whose backward pass always computes every gradient."""


def by_name(composites: Mapping[Callable[..., Any], Composite]) -> dict[str, Composite]:
    """Node name -> composite."""
    return {composite.name: composite for composite in composites.values()}


def forward_flops(node: Node, values: Sequence[Value], composites: Mapping[str, Composite]) -> float:
    """FLOPs of the forward pass; of causal attention, the unmasked half.

    A composite, which has no torch operation, computes its own unless they were recorded.
    """
    composite = composites.get(node.name) if node.op is None and not node.flops else None
    if composite is not None:
        return float(composite.flops(NodeView.of(node, values, 1)))
    causal = node.op is not None and base_name(node) in ATTENTION and node.flops
    return node.flops / 2 if causal and _torch.argument(node.op, node.args, "is_causal") else node.flops


def operands(node: Node) -> slice:
    """The tensor inputs that a product multiplies: neither a bias, which is added, nor a mask."""
    if base_name(node) in _ADDING:
        return slice(1, 3)
    return slice(0, 3 if base_name(node) in ATTENTION else 2)


def adds_trained(node: Node, flows: Sequence[bool]) -> bool:
    """Whether a product adds an input that gets a gradient, as a bias; `flows`: as in Tape.flows."""
    if base_name(node) in ATTENTION | _RECURRENT:
        return False
    multiplied = operands(node)
    return any(flows[: multiplied.start]) or any(flows[multiplied.stop :])


def gradients_made(node: Node, flows: Sequence[bool]) -> int:
    """Number of products of the forward's size in the backward pass of a product; `flows`: as in Tape.flows."""
    if base_name(node) in _RECURRENT:
        return 2 * any(flows)
    return sum(flows[operands(node)])


def backward_flops(node: Node, values: Sequence[Value], flows: Sequence[bool], flops: float) -> float:
    """FLOPs of the backward pass: a product of the forward's size for each operand that gets a gradient.

    `flows`: of the node, as in Tape.flows. `flops`: of the forward. Recomputation inside fused attention does not count.
    """
    wanted = flows[operands(node)]
    if base_name(node) not in ATTENTION:
        return flops * gradients_made(node, flows)
    if not flops or not any(wanted):
        return 0.0
    query, _, value = (values[ref.i].shape[-1] for ref in node.ins[:3])
    # of the two products of the forward, the first
    scores = flops * query / (query + value)
    by_query, by_key, by_value = wanted
    # query and key both need the gradient of the scores
    return scores * (by_query + by_key) + (flops - scores) * ((by_query or by_key) + by_value)
