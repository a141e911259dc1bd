"""What things cost on one mesh axis: operations by roofline, conversions by the collectives they are made of.

Sources: the roofline model (Williams et al., 2009) with one efficiency per cluster; collectives as alpha-beta rings
or trees (Thakur et al., 2005) on the slowest link that the axis crosses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.states import State, forward_kind, gradient_kind, is_shard
from meshwright_dtensor.strategy import CollectiveKind, Link
from meshwright_dtensor.trace import Node, Value

VIEWS = frozenset(
    {
        *(
            "view",
            "_unsafe_view",
            "reshape",
            "t",
            "transpose",
            "permute",
            "expand",
            "unsqueeze",
            "squeeze",
            "slice",
        ),
        *(
            "select",
            "split",
            "split_with_sizes",
            "unbind",
            "alias",
            "detach",
            "as_strided",
            "chunk",
            "narrow",
        ),
        *("diagonal", "unfold"),
    }
)
"""Operations that move no data."""

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
    """What one operation does, whole: operations, dtype of the product, and whether a gradient flows back through it."""

    flops: float
    dtype: str
    grad: bool
    moves_data: bool


@dataclass(frozen=True)
class AxisCosts:
    """Costs on a mesh axis of `degree` ranks joined by `link`."""

    cluster: Cluster
    link: Link
    degree: int

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
        passes = 1.0 + (BACKWARD if work.grad else 0.0)
        launches = self.cluster.launch_s * (1.0 + (1.0 if work.grad else 0.0))
        if not work.moves_data:
            return launches
        split = any(is_shard(s) for s in (*ins, *outs))
        flops = work.flops / self.degree if split else work.flops
        streamed = sum(values[r.i].nbytes * self.share(s) for r, s in zip(node.outs, outs))
        if "embedding" in node.name:
            streamed *= 2  # reads the rows it writes, not the whole table
        else:
            streamed += sum(values[r.i].nbytes * self.share(s) for r, s in zip(node.ins, ins))
        bandwidth = self.cluster.memory_bandwidth * self.cluster.memory_efficiency
        busy = max(flops / self.cluster.rate(work.dtype), streamed / bandwidth) * passes
        return max(busy, launches)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).rpartition(".")[2]


def work_of(node: Node, values: Sequence[Value], grad: Sequence[bool], flops: float) -> Work:
    """The work of a recorded node; `flops` is its forward count."""
    floating = [values[r.i].dtype for r in (*node.ins, *node.outs) if values[r.i].dtype.is_floating_point]
    name = node.name.removeprefix("aten.").split(".")[0]
    return Work(
        flops=flops,
        dtype=dtype_name(floating[0]) if floating else "float32",
        grad=any(grad[r.i] for r in node.outs),
        moves_data=name not in VIEWS,
    )


# bytes of optimizer state per element of a parameter, as multiples of the parameter's own element
OPTIMIZERS: Mapping[str, int] = MappingProxyType({"adamw": 2, "adam": 2, "sgd": 0, "sgd-momentum": 1})


def optimizer_seconds(cluster: Cluster, parameter_bytes: float, states: int) -> float:
    """Seconds of one optimizer step: reads parameter, gradient and states, writes parameter and states."""
    streamed = parameter_bytes * (3 + 2 * states)
    return streamed / (cluster.memory_bandwidth * cluster.memory_efficiency)
