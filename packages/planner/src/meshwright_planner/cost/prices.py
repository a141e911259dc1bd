"""Costs on the searched mesh axes: operations with their sizes on one rank, and the collectives of conversions.

Operations are timed by `cost/operations.py`, collectives by `meshwright_dtensor.cluster.links` on the slowest link that the axis
crosses. A cost model (`cost/cost_models.py`) replaces both.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from meshwright_dtensor.cluster import Cluster, CostModel, Operation
from meshwright_dtensor.sharding.boxes import local_shape_of
from meshwright_dtensor.sharding.states import State, States, forward_kind, gradient_kind, is_shard
from meshwright_dtensor.strategy import CollectiveKind, Link
from meshwright_dtensor.trace.graph import Node, Value
from meshwright_planner.cost.backward import BackwardTraffic
from meshwright_planner.cost.operations import FORWARD, timed
from meshwright_planner.trace.flops import adds_trained, gradients_made
from meshwright_planner.trace.op_kinds import base_name, kind_of

MANY = 1 << 30
"""More dims than a tensor has."""


@dataclass(frozen=True)
class Collective:
    """One collective along one searched axis.

    Args:
        kind: its kind.
        nbytes: bytes of the full tensor on this axis.
        axis: number of the axis, outermost first.
        parts: number of parts into which the other axes divide the tensor.
        dims: the dims that are sharded before it and after it; the parts of other ranks are strided there.
        copies: how often the runtime copies the full tensor, because the parts of ranks do not follow each other in memory.
    """

    kind: CollectiveKind
    nbytes: int
    axis: int = 0
    parts: int = 1
    dims: tuple[int, ...] = ()
    copies: int = 0

    def resized(self, nbytes: int, inner: int) -> Collective:
        """The same for a tensor of `nbytes` in all; `inner`: see `inner_dim`."""
        return replace(self, nbytes=nbytes // self.parts, copies=sum(dim >= inner for dim in self.dims))


def inner_dim(shape: Sequence[int]) -> int:
    """The first dim of which the parts of ranks are strided in memory: a dim before it has several elements."""
    return next((dim + 1 for dim, size in enumerate(shape) if size > 1), len(shape))


def along(state: State | States) -> States:
    """The state on each searched axis, outermost first; on one axis, a tuple of the state itself."""
    return state if isinstance(state, tuple) else (state,)


def move(source: State, target: State, nbytes: int, inner: int = MANY) -> Collective | None:
    """The collective that takes a value from kind `source` to kind `target` ("R", "P" or a dim); None when local."""
    if source == target:
        return None
    kind: CollectiveKind
    if source == "P":
        kind = "all_reduce" if target == "R" else "reduce_scatter"
    elif is_shard(source) and (target == "R" or is_shard(target)):
        kind = "all_gather" if target == "R" else "all_to_all"
    else:
        return None
    dims = tuple(int(state) for state in (source, target) if isinstance(state, int))
    return Collective(kind, nbytes, dims=dims).resized(nbytes, inner)


def convertible(source: State, target: State) -> bool:
    """Whether a value can be converted from `source` to `target`: a shard never becomes partial."""
    return not (is_shard(source) and target == "P")


def forward_move(source: State, target: State, nbytes: int, inner: int = MANY) -> Collective | None:
    """The collective of the forward pass that a conversion from `source` to `target` needs."""
    return move(forward_kind(source), forward_kind(target), nbytes, inner)


def backward_move(source: State, target: State, nbytes: int, inner: int = MANY) -> Collective | None:
    """The collective of the backward pass that a conversion from `source` to `target` needs."""
    back, front = gradient_kind(target), gradient_kind(source)
    # a sharded gradient becomes partial by padding with zeros, a replicated one by keeping one copy
    return None if front == "P" else move(back, front, nbytes, inner)


@dataclass(frozen=True)
class Work:
    """The work of one unsharded operation: FLOPs, dtype, and whether a gradient flows back through it.

    `kind`: see op_kinds.kind_of. `inputs_back`: number of inputs with a gradient, for a product of its operands.
    `table_bytes`: of the table of an embedding, whose gradient has the size of the whole table.
    `itemsize`, `products`: see cost_model.Operation. `back`: bytes of its backward pass, besides those of its products.
    `again`: how often the model's own checkpoints recompute its forward.
    """

    flops: float
    dtype: str
    grad: bool
    kind: str = "pointwise"
    inputs_back: int = 2
    table_bytes: int = 0
    itemsize: int = 4
    products: int = 1
    back: BackwardTraffic | None = None
    again: int = 0


@dataclass(frozen=True)
class AxisCosts:
    """Costs on a mesh axis of `degree` ranks joined by `link`.

    `meshed`: operations run on a mesh; not on one rank, nor when ranks only hold different modules.  `model`: times operations
    in place of the cluster's figures (the link times collectives).
    """

    cluster: Cluster
    link: Link
    degree: int
    meshed: bool = False
    model: CostModel | None = None

    def collective(self, collective: Collective | None) -> float:
        """Seconds of a collective on this axis, and of the copies before and after it."""
        if collective is None:
            return 0.0
        seconds = self.link.seconds(collective.kind, collective.nbytes, self.degree)
        # on CPUs messages pass through memory several times anyway
        if not collective.copies or self.degree == 1 or not self.cluster.accelerated:
            return seconds
        # an all-to-all exchanges what one rank holds
        held = collective.nbytes * collective.copies / (self.degree if collective.kind == "all_to_all" else 1)
        # its launch is part of the latency of the collective
        return seconds + 2.0 * held / self.cluster.streams

    def share(self, state: State) -> float:
        """The fraction of a value that one rank holds in `state`."""
        return 1.0 / self.degree if is_shard(state) else 1.0

    def split(self, states: Iterable[State]) -> Hashable:
        """A key for how work on tensors in these states is divided."""
        return any(map(is_shard, states))

    def sharers(self, split: Hashable) -> int:
        """Number of ranks that share work divided so."""
        return self.degree if split else 1

    def part(self, split: Hashable) -> float:
        """The fraction of one of them."""
        return 1.0 / self.sharers(split)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of the searched axes."""
        return (self.degree,)

    def ranks(self, collective: Collective) -> int:
        """Number of ranks in a collective."""
        return self.degree

    def compute(self, work: Work, node: Node, values: Sequence[Value], ins: States, outs: States) -> float:
        """Seconds of one operation, forward and backward, on one rank with its tensors in these states."""
        return self.timed(work, node, values, ins, outs)[0]

    def timed(
        self, work: Work, node: Node, values: Sequence[Value], ins: States, outs: States
    ) -> tuple[float, float]:
        """As `compute`, and the fraction of the seconds that is the forward pass."""
        op = self._sized(work, node, values, ins, outs)
        if self.model is None:
            return more_forward(*timed(self.cluster, op), work.again)
        inputs = tuple(self._local(values[r.i].shape, s) for r, s in zip(node.ins, ins))
        outputs = tuple(self._local(values[r.i].shape, s) for r, s in zip(node.outs, outs))
        # of first-party models
        figures = getattr(self.model, "figures", None)
        forward = FORWARD if figures is None else timed(figures, op)[1]
        seconds = self.model.operation(op._replace(inputs=inputs, outputs=outputs))
        return more_forward(seconds, forward, work.again)

    def _sized(self, work: Work, node: Node, values: Sequence[Value], ins: States, outs: States) -> Operation:
        """The operation on one rank; without shapes, which only cost models need, except that of a product on a chip."""
        made = tuple([values[r.i].nbytes * self.share(s) for r, s in zip(node.outs, outs)])
        streamed, split = sum(made), self.split((*ins, *outs))
        table = work.table_bytes
        if work.kind == "embedding":
            # reads only the rows that it writes
            streamed *= 2
            table = int(table * self.share(ins[1] if len(ins) > 1 else "I"))
        else:
            streamed += sum(values[r.i].nbytes * self.share(s) for r, s in zip(node.ins, ins))
        backward_bytes = None
        if work.back is not None:
            # what the backward pass reads and writes
            tensors = (*zip(node.ins, ins, work.back.ins), *zip(node.outs, outs, work.back.outs))
            sizes = (times * values[r.i].nbytes * self.share(s) for r, s, times in tensors if times)
            backward_bytes = sum(sizes) + work.back.kept * self.part(split)
        outputs: tuple[tuple[int, ...], ...] = ()
        if work.flops and self.cluster.chip is not None and outs:
            outputs = (self._part(values[node.outs[0].i].shape, outs[0]),)
        return Operation(
            node.name,
            work.kind,
            work.dtype,
            work.flops / self.sharers(split),
            streamed,
            work.grad,
            work.inputs_back,
            made,
            outputs=outputs,
            itemsize=work.itemsize,
            products=work.products,
            table_bytes=table,
            on_mesh=self.meshed,
            backward_bytes=backward_bytes,
        )

    def _part(self, shape: tuple[int, ...], state: State | States) -> tuple[int, ...]:
        """The shape of an even part of a value in `state`, whatever the intervals of its shards."""
        sizes = list(shape)
        for along_axis, degree in zip(along(state), self.degrees):
            if is_shard(along_axis):
                sizes[int(along_axis)] = -(-sizes[int(along_axis)] // degree)
        return tuple(sizes)

    def _local(self, shape: tuple[int, ...], state: State) -> tuple[int, ...]:
        """The shape that the first rank has of a value in `state`."""
        states = along(state)
        return local_shape_of(shape, self.degrees[: len(states)], (0,) * len(states), states)


@dataclass(frozen=True)
class JointCosts(AxisCosts):
    """Costs on several searched axes; `axes` are those of each, `degree` is the number of their ranks together."""

    axes: tuple[AxisCosts, ...] = ()

    @staticmethod
    def of(axes: Sequence[AxisCosts]) -> JointCosts:
        """The costs of axes on one cluster, outermost first."""
        first = axes[0]
        degree = math.prod(a.degree for a in axes)
        return JointCosts(first.cluster, first.link, degree, first.meshed, first.model, tuple(axes))

    def collective(self, collective: Collective | None) -> float:
        """Seconds of a collective on the link of its axis."""
        return 0.0 if collective is None else self.axes[collective.axis].collective(collective)

    def share(self, state: State) -> float:
        """The fraction of a value that one rank holds."""
        return self.part(self.split((state,)))

    def split(self, states: Iterable[State]) -> Hashable:
        """Per axis, whether work on tensors in these states is divided along it."""
        given, axes = list(states), range(len(self.axes))
        return tuple(any(is_shard(s[a] if isinstance(s, tuple) else s) for s in given) for a in axes)

    def sharers(self, split: Hashable) -> int:
        """Number of ranks that share work divided so."""
        assert isinstance(split, tuple)
        return math.prod(a.degree for a, divided in zip(self.axes, split, strict=True) if divided)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degrees of the axes."""
        return tuple(a.degree for a in self.axes)

    def ranks(self, collective: Collective) -> int:
        """Number of ranks in a collective."""
        return self.axes[collective.axis].degree


def more_forward(seconds: float, forward: float, times: float) -> tuple[float, float]:
    """Seconds, and the fraction of one forward pass, when the forward is recomputed `times` times."""
    more = 1 + times * forward
    return (seconds * more, forward / more) if times else (seconds, forward)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" of torch.float32."""
    return str(dtype).rpartition(".")[2]


def work_of(
    node: Node,
    values: Sequence[Value],
    flows: Sequence[bool],
    flops: float,
    back: BackwardTraffic | None = None,
    again: int = 0,
) -> Work:
    """The work of a recorded node; `flows` and `again`: its entries of Tape.flows and Tape.again.

    `flops`: its forward count; `back`: what its backward pass moves, where that is known.
    """
    floating = [values[r.i].dtype for r in (*node.ins, *node.outs) if values[r.i].dtype.is_floating_point]
    first = values[node.ins[0].i].shape if node.ins else ()
    kind = kind_of(node, flops, int(first[-1]) if first else 1)
    batched = bool(node.outs) and base_name(node) in ("bmm", "baddbmm")
    return Work(
        flops=flops,
        dtype=dtype_name(floating[0]) if floating else "float32",
        grad=any(flows),
        kind=kind,
        inputs_back=gradients_made(node, flows) if flops else sum(flows),
        table_bytes=max((values[r.i].nbytes for r in node.ins), default=0) if kind == "embedding" else 0,
        itemsize=values[node.outs[0].i].dtype.itemsize if node.outs else 4,
        products=math.prod(values[node.outs[0].i].shape[:-2]) if batched else 1,
        back=None if back is None else back.around_products(adds_trained(node, flows)) if flops else back,
        again=again,
    )
