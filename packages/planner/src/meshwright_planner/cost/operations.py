"""The time of one operation on one rank: by the measured curve of its kind, else by roofline.

Sources: the curves of a measured machine, else products by their shape (`cost/products.py`) where the cluster says what its
processor is, and the roofline model (Williams et al., 2009) with one efficiency per cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from meshwright_dtensor.cluster import Cluster, MeasuredWork, Operation
from meshwright_planner.cost.products import Product, attention_seconds, product_seconds

BACKWARD = 2.0
"""Backward work relative to forward: one product or pass for the input, one for the other operand."""

ATTENTION = 2.5
"""The same for attention that saves no scores: five products for two (Dao, "FlashAttention-2", 2023, 3.1)."""

ATTENTION_BACKWARD = 63 / 73
"""Rate of the backward kernel of fused attention relative to the forward one (Dao, 2023: 63% and 73% of the peak of an A100)."""

FORWARD = 1 / (1 + BACKWARD)
"""Default fraction of an operation's seconds that is its forward pass."""

# bytes of optimizer state per element of a parameter, as multiples of the parameter's own element
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1})


class Copies(NamedTuple):
    """Temporary copies of parameters in an optimizer step, with torch's default arguments (2.13).

    Attributes:
        together: of all parameters, in a foreach step.
        current, previous: of the current and of the previous parameter, in a single-tensor step. Fused steps make none.
    """

    together: int = 0
    current: int = 0
    previous: int = 0


COPIES: Mapping[str, Copies] = MappingProxyType(
    {"adamw": Copies(1, 2, 1), "adam": Copies(1, 2, 1), "sgd": Copies(), "sgd-momentum": Copies()}
)

UPDATE = "update"
"""Kind of operation of an optimizer step."""


def timed(cluster: Cluster, op: Operation) -> tuple[float, float]:
    """Seconds of one operation, forward and backward, with launches that compute does not hide; and its forward fraction."""
    if op.kind == UPDATE:
        nbytes = sum(op.made)
        passes = op.nbytes / nbytes if nbytes else 0.0
        return _update_seconds(cluster, nbytes, passes, op.tensors), FORWARD
    around = cluster.host_s + (cluster.dispatch_s if op.on_mesh else 0.0)
    launches = cluster.launch_s + (cluster.backward_launch_s if op.backward else 0.0)
    launches += around
    if op.kind == "view":
        view = cluster.measured("view", "float32")
        seconds = launches if view is None else view.seconds(1.0, (True, op.backward)) + around
        # it moves no data, but its backward pass may
        back = (op.backward_bytes or 0.0) / cluster.streams if op.backward else 0.0
        seconds = max(seconds, back) if cluster.hides_launch else seconds + back
        return seconds, 0.0 if back > launches else _usual_fraction(op)
    # the gradient of an embedding table is filled with zeros first
    filled = op.table_bytes / cluster.streams if op.backward else 0.0
    curve = cluster.measured(op.kind, op.dtype) or cluster.measured(op.kind, "float32")
    if curve is not None:
        busy = _measured(cluster, curve, op) + filled
        return (max(busy, launches) if cluster.hides_launch else busy + around), _usual_fraction(op)
    forward, back = _by_figures(cluster, op)
    busy = forward + (back + filled if op.backward else 0.0)
    seconds = max(busy, launches) if cluster.hides_launch else busy + launches
    return seconds, forward / busy if busy else FORWARD


def _by_figures(cluster: Cluster, op: Operation) -> tuple[float, float]:
    """Seconds of forward and backward of an operation that was not measured."""
    least = op.nbytes / cluster.streams
    shaped = cluster.chip is not None and op.flops and op.outputs
    # of a product: gradients that are added to those of other readers
    sums = (op.backward_bytes or 0.0) / cluster.streams
    if op.kind.startswith("attention"):
        if shaped:
            forward = max(attention_seconds(cluster, op.outputs[0], op.flops, op.dtype), least)
            return forward, ATTENTION / ATTENTION_BACKWARD * forward + sums
        forward = max(op.flops / cluster.rate(op.dtype), least)
        return forward, ATTENTION * forward + sums
    if shaped:
        product = Product.of(op.outputs[0], op.flops, op.products, op.itemsize)
        forward = max(product_seconds(cluster, product, op.dtype), least)
        back = sum(max(product_seconds(cluster, each, op.dtype), least) for each in product.gradients())
        return forward, back * min(op.gradients, 2) / 2 + sums
    forward = max(op.flops / cluster.rate(op.dtype), least)
    if op.flops:
        return forward, BACKWARD * min(op.gradients, 2) / 2 * forward + sums
    if op.backward_bytes is not None:
        return forward, op.backward_bytes / cluster.streams
    return forward, BACKWARD * forward


def _usual_fraction(op: Operation) -> float:
    """The fraction of the forward pass by the number of gradients, when times are not separate."""
    operands = min(op.gradients, 2) / 2 if op.flops else 1.0
    return 1 / (1 + BACKWARD * operands) if op.backward else 1.0


def _measured(cluster: Cluster, curve: MeasuredWork, op: Operation) -> float:
    """Seconds by a measured curve: products by FLOPs, other kinds by bytes."""
    if op.kind == "matmul" or op.kind.startswith("attention"):
        forward = curve.seconds(op.flops, (True, False))
        back = curve.seconds(op.flops, (False, True)) if op.backward else 0.0
        # measured with both gradients
        if op.kind == "matmul":
            back *= min(op.gradients, 2) / 2
        least = op.nbytes / cluster.streams
        even = even_bytes(op.flops, op.itemsize, op.products) if op.made else 0.0
        thin, more = cluster.measured("thin", "float32"), op.nbytes - even
        if op.kind == "matmul" and cluster.chip is not None and op.outputs:
            # the curve is of sides that are about equal
            product = Product.of(op.outputs[0], op.flops, op.products, op.itemsize)
            like = product_seconds(cluster, product.even(), op.dtype)
            forward *= product_seconds(cluster, product, op.dtype) / like
            back *= sum(product_seconds(cluster, each, op.dtype) for each in product.gradients()) / (2 * like)
        elif op.kind == "matmul" and thin is not None and more > 0:
            # it moves more bytes than a product of equal sides
            (nbytes, first), (_, later) = thin.forward[0], thin.backward[0]
            forward += first * more / nbytes
            back += later * more / nbytes * min(op.gradients, 2) / 2 if op.backward else 0.0
        pages, fresh = cluster.measured("fresh", "float32"), 0.0
        if pages is not None:
            # large new tensors get new memory pages
            smallest = pages.forward[0][0]
            fresh = sum(pages.seconds(nbytes, (True, False)) for nbytes in op.made if nbytes >= smallest)
        sums = (op.backward_bytes or 0.0) / cluster.streams if op.backward else 0.0
        return max(forward, least) + max(back, least if op.backward else 0.0) + fresh + sums
    return curve.seconds(op.nbytes, (True, op.backward))


def even_bytes(flops: float, itemsize: int = 4, matrices: int = 1) -> float:
    """Bytes that a product moves when its sides are about equal, as measured; `matrices`: of separate ones in a batch."""
    return 1.2 * 3 * itemsize * (flops / matrices / 2) ** (2 / 3) * matrices


def update_of(optimizer: str, states: float, nbytes: float, parameters: int) -> Operation:
    """An optimizer step over parameters of `nbytes` in all: reads parameter, gradient, states, writes parameter, states.

    `states`: their bytes by those of the parameters.
    """
    streamed = nbytes * (3 + 2 * states)
    return Operation(optimizer, UPDATE, "float32", 0.0, streamed, False, made=(nbytes,), tensors=parameters)


def optimizer_seconds(cluster: Cluster, parameter_bytes: float, states: float, parameters: int = 0) -> float:
    """Seconds of one optimizer step over `parameters` parameters of `parameter_bytes` in all.

    It reads parameter, gradient and states and writes parameter and states.
    """
    return _update_seconds(cluster, parameter_bytes, 3 + 2 * states, parameters)


def _update_seconds(cluster: Cluster, parameter_bytes: float, passes: float, parameters: int) -> float:
    """`optimizer_seconds`, of a step that moves the bytes of the parameters so many times; measured, AdamW's, which are 7."""
    curve = cluster.measured(UPDATE, "float32")
    if curve is not None and parameters:
        return parameters * (passes / 7) * curve.seconds(parameter_bytes / parameters, (True, False))
    return parameter_bytes * passes / cluster.streams + parameters * cluster.update_s
