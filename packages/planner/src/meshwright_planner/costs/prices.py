"""What things cost on one mesh axis: operations by roofline, conversions by the collectives they are made of.

Sources: the roofline model (Williams et al., 2009) with one efficiency per cluster, or the curves of a measured machine;
collectives as `meshwright_dtensor.links` times them, on the slowest link that the axis crosses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from meshwright_dtensor.cluster import Cluster, MeasuredWork
from meshwright_dtensor.states import State, forward_kind, gradient_kind, is_shard
from meshwright_dtensor.strategy import CollectiveKind, Link
from meshwright_dtensor.trace import Node, Value
from meshwright_planner.costs.kinds import base_name, kind_of

BACKWARD = 2.0
"""Backward work relative to forward: one product or pass for the input, one for the other operand."""


@dataclass(frozen=True)
class Collective:
    """One collective: kind, and the bytes of the full tensor on the axis."""

    kind: CollectiveKind
    nbytes: int


def move(source: State, target: State, nbytes: int) -> Collective | None:
    """The collective that takes a value from kind `source` to kind `target` ("R", "P" or a dim); None when local."""
    if source == target:
        return None
    if source == "P":
        return Collective("all_reduce" if target == "R" else "reduce_scatter", nbytes)
    if is_shard(source):
        if target == "R":
            return Collective("all_gather", nbytes)
        if is_shard(target):
            return Collective("all_to_all", nbytes)
    return None


def convertible(source: State, target: State) -> bool:
    """Whether a value in `source` can be brought to `target`: a shard is never made partial."""
    return not (is_shard(source) and target == "P")


def forward_move(source: State, target: State, nbytes: int) -> Collective | None:
    """The collective of the forward pass that a conversion from `source` to `target` needs."""
    return move(forward_kind(source), forward_kind(target), nbytes)


def backward_move(source: State, target: State, nbytes: int) -> Collective | None:
    """The collective of the backward pass that a conversion from `source` to `target` needs."""
    back, front = gradient_kind(target), gradient_kind(source)
    # a sharded gradient becomes partial by padding with zeros, a replicated one by keeping one copy
    return None if front == "P" else move(back, front, nbytes)


@dataclass(frozen=True)
class Work:
    """What one operation does, whole: operations, dtype of the product, and whether a gradient flows back through it.

    `kind`: see kinds.kind_of. `inputs_back`: how many of its inputs get a gradient. `table_bytes`: of the table that an
    embedding reads, whose gradient is as large however few of its rows are read.
    """

    flops: float
    dtype: str
    grad: bool
    moves_data: bool
    kind: str = "pointwise"
    inputs_back: int = 2
    table_bytes: int = 0


@dataclass(frozen=True)
class AxisCosts:
    """Costs on a mesh axis of `degree` ranks joined by `link`.

    `meshed`: operations are laid over a mesh; they are not on one rank, nor where ranks hold different modules and nothing
    else.
    """

    cluster: Cluster
    link: Link
    degree: int
    meshed: bool = False

    def collective(self, collective: Collective | None) -> float:
        """Seconds of a collective on this axis."""
        return (
            0.0 if collective is None else self.link.seconds(collective.kind, collective.nbytes, self.degree)
        )

    def share(self, state: State) -> float:
        """The part of a value that one rank holds in `state`."""
        return 1.0 / self.degree if is_shard(state) else 1.0

    def compute(
        self, work: Work, node: Node, values: Sequence[Value], ins: Sequence[State], outs: Sequence[State]
    ) -> float:
        """Seconds of one operation, forward and backward, on one rank with its tensors in these states."""
        cluster = self.cluster
        launches = cluster.launch_s + (cluster.backward_launch_s if work.grad else 0.0)
        made = [values[r.i].nbytes * self.share(s) for r, s in zip(node.outs, outs)]
        around = cluster.host_s + (cluster.dispatch_s if self.meshed else 0.0)
        launches += around
        if not work.moves_data:
            view = cluster.measured("view", "float32")
            return launches if view is None else view.seconds(1.0, (True, work.grad)) + around
        split = any(is_shard(s) for s in (*ins, *outs))
        flops = work.flops / self.degree if split else work.flops
        streamed = sum(made)
        table = work.table_bytes
        if work.kind == "embedding":
            streamed *= 2  # reads the rows it writes, not the whole table
            table = int(table * self.share(ins[1] if len(ins) > 1 else "I"))
        else:
            streamed += sum(values[r.i].nbytes * self.share(s) for r, s in zip(node.ins, ins))
        # the gradient of a table is filled with zeros first
        filled = table / cluster.streams if work.grad else 0.0
        known = cluster.measured(work.kind, work.dtype) or cluster.measured(work.kind, "float32")
        if known is not None:
            even = sum(
                even_bytes(flops, values[r.i].dtype.itemsize, _matrices(node, values)) for r in node.outs[:1]
            )
            busy = self._measured(work, known, flops, streamed, even, sum(map(self._fresh, made))) + filled
            return max(busy, launches) if cluster.hides_launch else busy + around
        operands = min(work.inputs_back, 2) / 2 if flops else 1.0
        passes = 1.0 + (BACKWARD * operands if work.grad else 0.0)
        busy = max(flops / cluster.rate(work.dtype), streamed / cluster.streams) * passes + filled
        return max(busy, launches) if cluster.hides_launch else busy + launches

    def _measured(
        self, work: Work, known: MeasuredWork, flops: float, streamed: float, even: float, fresh: float
    ) -> float:
        """By the curve of its kind, products by operations, the rest by bytes.

        `even`: bytes that products of equal sides would move; `fresh`: seconds of memory for what products make.
        """
        if work.kind == "matmul" or work.kind.startswith("attention"):
            ahead = known.seconds(flops, (True, False))
            back = known.seconds(flops, (False, True)) if work.grad else 0.0
            if work.kind == "matmul":  # measured with both gradients
                back *= min(work.inputs_back, 2) / 2
            least = streamed / self.cluster.streams
            first, later = self._thin(streamed - even) if work.kind == "matmul" else (0.0, 0.0)
            ahead += first
            back += later * min(work.inputs_back, 2) / 2 if work.grad else 0.0
            return max(ahead, least) + max(back, least if work.grad else 0.0) + fresh
        return known.seconds(streamed, (True, work.grad))

    def _thin(self, more: float) -> tuple[float, float]:
        """Seconds that a product takes longer, forward and backward, for moving so many bytes more than one of equal sides."""
        known = self.cluster.measured("thin", "float32")
        if known is None or more <= 0:
            return 0.0, 0.0
        (nbytes, ahead), (_, back) = known.forward[0], known.backward[0]
        return ahead * more / nbytes, back * more / nbytes

    def _fresh(self, nbytes: float) -> float:
        """Seconds that a new tensor takes before anything is written to it: large ones get pages of their own."""
        known = self.cluster.measured("fresh", "float32")
        return 0.0 if known is None or nbytes < known.forward[0][0] else known.seconds(nbytes, (True, False))


def even_bytes(flops: float, itemsize: int = 4, matrices: int = 1) -> float:
    """Bytes that a product of so many operations moves where its sides are about equal, as in the measured shapes.

    `matrices`: products of their own that it is made of.
    """
    return 1.2 * 3 * itemsize * (flops / matrices / 2) ** (2 / 3) * matrices


def _matrices(node: Node, values: Sequence[Value]) -> int:
    """How many products of matrices a product is made of."""
    shape = values[node.outs[0].i].shape
    return math.prod(shape[:-2]) if base_name(node) in ("bmm", "baddbmm") else 1


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).rpartition(".")[2]


def work_of(node: Node, values: Sequence[Value], grad: Sequence[bool], flops: float) -> Work:
    """The work of a recorded node; `flops` is its forward count."""
    floating = [values[r.i].dtype for r in (*node.ins, *node.outs) if values[r.i].dtype.is_floating_point]
    first = values[node.ins[0].i].shape if node.ins else ()
    kind = kind_of(node, flops, int(first[-1]) if first else 1)
    return Work(
        flops=flops,
        dtype=dtype_name(floating[0]) if floating else "float32",
        grad=any(grad[r.i] for r in node.outs),
        moves_data=kind != "view",
        kind=kind,
        inputs_back=sum(grad[r.i] for r in node.ins if values[r.i].dtype.is_floating_point),
        table_bytes=max((values[r.i].nbytes for r in node.ins), default=0) if kind == "embedding" else 0,
    )


# bytes of optimizer state per element of a parameter, as multiples of the parameter's own element
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1})


def optimizer_seconds(cluster: Cluster, parameter_bytes: float, states: int, parameters: int = 0) -> float:
    """Seconds of one optimizer step over `parameters` parameters of `parameter_bytes` in all.

    It reads parameter, gradient and states and writes parameter and states; measured, a step of AdamW (two states).
    """
    known = cluster.measured("update", "float32")
    if known is not None and parameters:
        part = (3 + 2 * states) / 7
        return parameters * part * known.seconds(parameter_bytes / parameters, (True, False))
    streamed = parameter_bytes * (3 + 2 * states)
    return streamed / cluster.streams + parameters * cluster.update_s
