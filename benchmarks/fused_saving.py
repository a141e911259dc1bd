"""The predicted saving of a fusing compiler: each chain of memory-bound operations becomes one kernel.

For predictions of a compiled run; plans do not use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.cost.backward import BackwardTraffics
from meshwright_planner.cost.prices import AxisCosts, Work, work_of
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.flops import by_name, forward_flops
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Tape

FUSED = frozenset({"pointwise", "function", "norm", "reduce", "copy", "view", "dropout", "softmax"})
"""Kinds of operations (op_kinds.kind_of) that fuse with their producers and consumers."""


@dataclass(frozen=True)
class OneRank:
    """The operations of a step with nothing divided, and their costs on one device."""

    tape: Tape
    works: Sequence[Work]
    costs: AxisCosts

    @staticmethod
    def of(model: nn.Module, batch: Batch, cluster: Cluster, dtype: torch.dtype | None = None) -> OneRank:
        """`dtype`: the compute dtype."""
        book = RuleBook.default()
        tape = record(model, batch, book.composites, dtype)
        composites = by_name(book.composites)
        backwards = BackwardTraffics(tape)
        works = [
            work_of(
                node,
                tape.values,
                tape.flows[index],
                forward_flops(node, tape.values, composites),
                backwards.of(tape, index),
                tape.again[index],
            )
            for index, node in enumerate(tape.nodes)
        ]
        return OneRank(tape, works, AxisCosts(cluster, cluster.link(1, 1), 1))

    def timed(self, index: int) -> tuple[float, float]:
        """Seconds of an operation, both passes, and the fraction of its forward pass."""
        node = self.tape.nodes[index]
        ins, outs = (["I"] * len(refs) for refs in (node.ins, node.outs))
        return self.costs.timed(self.works[index], node, self.tape.values, ins, outs)


def fused_saving(model: nn.Module, batch: Batch, cluster: Cluster, dtype: torch.dtype | None = None) -> float:
    """Seconds of one step on one rank that fusion saves: `batch` is that rank's part, `dtype` the compute dtype."""
    return saved_by_fusion(OneRank.of(model, batch, cluster, dtype))


def saved_by_fusion(rank: OneRank) -> float:
    """Seconds of one step that fusion saves."""
    tape, group = rank.tape, _groups(rank.tape, rank.works)
    separate = sum(rank.timed(index)[0] for index in group)
    members: dict[int, list[int]] = {}
    for index, number in group.items():
        members.setdefault(number, []).append(index)
    fused = sum(_traffic(tape, nodes) / rank.costs.cluster.streams for nodes in members.values())
    return max(0.0, separate - fused)


def _groups(tape: Tape, works: Sequence[Work]) -> dict[int, int]:
    """Node that fuses -> number of its group: producers and consumers of one value, without a product between them."""
    parent = {i: i for i, work in enumerate(works) if work.kind in FUSED and not work.flops}

    def find(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    maker: dict[int, int] = {}
    # of a value: the number of nodes before it that do not fuse, one after the other
    depth: dict[int, int] = {}
    level: dict[int, int] = {}
    for index, node in enumerate(tape.nodes):
        level[index] = max((depth.get(ref.i, 0) for ref in node.ins), default=0)
        depth.update((ref.i, level[index] + (index not in parent)) for ref in node.outs)
        if index in parent:
            for ref in node.ins:
                if ref.i in maker and level[maker[ref.i]] == level[index]:
                    parent[find(index)] = find(maker[ref.i])
        for ref in node.outs:
            if index in parent:
                maker[ref.i] = index
            else:
                maker.pop(ref.i, None)
    return {i: find(i) for i in parent}


def _traffic(tape: Tape, nodes: list[int]) -> float:
    """Bytes that one kernel of these nodes reads and writes, and its backward kernel if gradients flow.

    The backward kernel reads the gradients of the outputs and the inputs, and writes the gradients of the inputs.
    """
    inside = set(nodes)
    made = {ref.i for i in nodes for ref in tape.nodes[i].outs}
    read = {ref.i for i in nodes for ref in tape.nodes[i].ins} - made
    wanted = {ref.i for i, node in enumerate(tape.nodes) if i not in inside for ref in node.ins}
    wanted |= set(tape.results)
    written = made & wanted
    grad = any(tape.grad[v] for v in made)
    into, out = (sum(tape.values[v].nbytes for v in some) for some in (read, written))
    back = out + into + sum(tape.values[v].nbytes for v in read if tape.grad[v]) if grad else 0
    return float(into + out + back)
