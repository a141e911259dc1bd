"""What one operation takes on one rank of a cluster: by its curve where the cluster was measured, else by roofline.

Sources: the roofline model (Williams et al., 2009) with one efficiency per cluster, or the curves of a measured machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from meshwright_dtensor.cluster import Cluster, MeasuredWork, Operation

BACKWARD = 2.0
"""Backward work relative to forward: one product or pass for the input, one for the other operand."""

ATTENTION = 2.5
"""The same of attention that keeps no scores: five products for two (Dao, "FlashAttention-2", 2023, 3.1)."""

FORWARD = 1 / (1 + BACKWARD)
"""Part of an operation's seconds that is its forward pass, where nothing says more."""

# bytes of optimizer state per element of a parameter, as multiples of the parameter's own element
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1})


class Copies(NamedTuple):
    """Copies that an optimizer's step makes beside gradients and states, with torch's default arguments (2.13).

    Attributes:
        together: of all parameters, where it steps them at once (foreach).
        own, last: of the one that it is at, and of the one before it, where it goes from one to the other; fused steps make none.
    """

    together: int = 0
    own: int = 0
    last: int = 0


COPIES: Mapping[str, Copies] = MappingProxyType(
    {"adamw": Copies(1, 2, 1), "adam": Copies(1, 2, 1), "sgd": Copies(), "sgd-momentum": Copies()}
)

UPDATE = "update"
"""Kind of the work of an optimizer's step."""


def operation_seconds(cluster: Cluster, op: Operation) -> float:
    """Seconds of one operation, forward and backward, launches included where nothing hides them."""
    return timed(cluster, op)[0]


def timed(cluster: Cluster, op: Operation) -> tuple[float, float]:
    """Seconds of one operation, as in `operation_seconds`, and the part of them that is its forward pass."""
    if op.kind == UPDATE:
        return optimizer_seconds(cluster, sum(op.made), OPTIMIZERS[op.name], op.tensors), FORWARD
    around = cluster.host_s + (cluster.dispatch_s if op.on_mesh else 0.0)
    launches = cluster.launch_s + (cluster.backward_launch_s if op.backward else 0.0)
    launches += around
    if op.kind == "view":
        view = cluster.measured("view", "float32")
        return (launches if view is None else view.seconds(1.0, (True, op.backward)) + around), _usual(op)
    # the gradient of a table is filled with zeros first
    filled = op.table_bytes / cluster.streams if op.backward else 0.0
    known = cluster.measured(op.kind, op.dtype) or cluster.measured(op.kind, "float32")
    if known is not None:
        busy = _measured(cluster, known, op) + filled
        return (max(busy, launches) if cluster.hides_launch else busy + around), _usual(op)
    ahead = max(op.flops / cluster.rate(op.dtype), op.nbytes / cluster.streams)
    busy = ahead + (_back(cluster, op, ahead) + filled if op.backward else 0.0)
    return (
        max(busy, launches) if cluster.hides_launch else busy + launches
    ), ahead / busy if busy else FORWARD


def _usual(op: Operation) -> float:
    """The part of the seconds that is the forward pass where no more is known: what its gradients leave."""
    operands = min(op.gradients, 2) / 2 if op.flops else 1.0
    return 1 / (1 + BACKWARD * operands) if op.backward else 1.0


def _back(cluster: Cluster, op: Operation, ahead: float) -> float:
    """Seconds of the backward pass of an operation that takes so many forward."""
    if op.kind.startswith("attention"):
        return ATTENTION * ahead
    if op.flops:
        return BACKWARD * min(op.gradients, 2) / 2 * ahead
    return BACKWARD * ahead if op.backward_bytes is None else op.backward_bytes / cluster.streams


def _measured(cluster: Cluster, known: MeasuredWork, op: Operation) -> float:
    """By the curve of its kind, products by operations, the rest by bytes."""
    if op.kind == "matmul" or op.kind.startswith("attention"):
        ahead = known.seconds(op.flops, (True, False))
        back = known.seconds(op.flops, (False, True)) if op.backward else 0.0
        if op.kind == "matmul":  # measured with both gradients
            back *= min(op.gradients, 2) / 2
        least = op.nbytes / cluster.streams
        even = even_bytes(op.flops, op.itemsize, op.products) if op.made else 0.0
        first, later = _thin(cluster, op.nbytes - even) if op.kind == "matmul" else (0.0, 0.0)
        ahead += first
        back += later * min(op.gradients, 2) / 2 if op.backward else 0.0
        fresh = sum(_fresh(cluster, nbytes) for nbytes in op.made)
        return max(ahead, least) + max(back, least if op.backward else 0.0) + fresh
    return known.seconds(op.nbytes, (True, op.backward))


def _thin(cluster: Cluster, more: float) -> tuple[float, float]:
    """Seconds that a product takes longer, forward and backward, for moving so many bytes more than one of equal sides."""
    known = cluster.measured("thin", "float32")
    if known is None or more <= 0:
        return 0.0, 0.0
    (nbytes, ahead), (_, back) = known.forward[0], known.backward[0]
    return ahead * more / nbytes, back * more / nbytes


def _fresh(cluster: Cluster, nbytes: float) -> float:
    """Seconds that a new tensor takes before anything is written to it: large ones get pages of their own."""
    known = cluster.measured("fresh", "float32")
    return 0.0 if known is None or nbytes < known.forward[0][0] else known.seconds(nbytes, (True, False))


def even_bytes(flops: float, itemsize: int = 4, matrices: int = 1) -> float:
    """Bytes that a product of so many operations moves where its sides are about equal, as in the measured shapes.

    `matrices`: products of their own that it is made of.
    """
    return 1.2 * 3 * itemsize * (flops / matrices / 2) ** (2 / 3) * matrices


def update_of(optimizer: str, parameter_bytes: float, parameters: int = 0) -> Operation:
    """An optimizer's step over `parameters` parameters of `parameter_bytes` in all.

    It reads parameter, gradient and states and writes parameter and states.
    """
    streamed = parameter_bytes * (3 + 2 * OPTIMIZERS[optimizer])
    return Operation(
        optimizer, UPDATE, "float32", 0.0, streamed, False, made=(parameter_bytes,), tensors=parameters
    )


def optimizer_seconds(cluster: Cluster, parameter_bytes: float, states: int, parameters: int = 0) -> float:
    """Seconds of one optimizer step over `parameters` parameters of `parameter_bytes` in all.

    It reads parameter, gradient and states and writes parameter and states; measured, a step of AdamW (two states).
    """
    known = cluster.measured(UPDATE, "float32")
    if known is not None and parameters:
        part = (3 + 2 * states) / 7
        return parameters * part * known.seconds(parameter_bytes / parameters, (True, False))
    streamed = parameter_bytes * (3 + 2 * states)
    return streamed / cluster.streams + parameters * cluster.update_s
