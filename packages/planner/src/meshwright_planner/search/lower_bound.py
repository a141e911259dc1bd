"""A lower bound on the seconds of a step, for every configuration of the same ranks.

Three facts hold whatever the degrees, placements, schedule or recompute:

- Products with weights are divided by tokens, by weights or by modules, over all axes together by at most the number of
  ranks. They run at no better rate than the best that the cluster reaches.
- Each recorded operation is issued at least once on the ranks that have its module. Only stages of a pipeline share this.
- The optimizer updates the states of all trained parameters once, divided over at most all ranks.

A product counts with its FLOPs only if its operand is as long as the tokens of a rank; other products (experts, attention
scores) only count as issued. A product grows with the batch if two tapes with different rows show it, and else counts once.
Communication, bubbles and memory-bound operations count as nothing: this is a bound, not an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.cluster.links import Points
from meshwright_dtensor.trace.graph import Node
from meshwright_planner.cost.operations import BACKWARD
from meshwright_planner.cost.prices import Work, work_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Basis
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.trace.tape import Tape


class Floor:
    """The least seconds of a step, by the number of stages.

    Args:
        cluster: its figures are the costs.
        candidate: any candidate; its tape lists the operations.
        other: the tape of the same work on other rows (see `Tapes.other`); None where there is none.
    """

    def __init__(self, basis: Basis, cluster: Cluster, candidate: Candidate, other: Tape | None) -> None:
        self._basis, self._cluster = basis, cluster
        setting, problem = basis.setting, candidate.problem
        tape, (rows, tokens) = problem.tape, _local(basis, candidate)
        by_rows, sequence = setting.batch.size / rows, setting.batch.sequence_length is not None
        products = _products(tape, sequence)
        others: dict[int, int] = {}
        if other is not None:
            # a tape of one row may have fewer nodes, but has the same products
            same = _products(other, sequence).values()
            if [names for names, _ in products.values()] == [names for names, _ in same]:
                others = {k: length for k, (_, length) in zip(products, same, strict=True)}
        # the optimizer's step at the best rate
        measured, states = cluster.measured("update", "float32"), setting.states
        streamed = basis.bytes[1] * (3 + 2 * states)
        self._update = streamed / cluster.streams
        if measured is not None:
            self._update = (3 + 2 * states) / 7 * basis.bytes[1] * _least_rate(measured.forward)
        # per representative node: seconds of its product, undivided, and seconds of issuing it
        self._least: list[tuple[float, float]] = []
        for k in problem.quotient.nodes:
            node, count = tape.nodes[k], problem.quotient.node_count[k]
            flops = problem.legality.flops(k)
            work = work_of(node, tape.values, tape.flows[k], flops)
            long = products[k][1] if k in products else 0
            times = float(long in (rows, tokens))
            if other is not None and others.get(k, 0) * rows == long * other.rows:
                times *= by_rows
            product, issued = _least(cluster, work, flops * times)
            self._least.append((count * product, count * issued))

    def seconds(self, stages: int) -> float:
        """The least seconds with the modules divided over `stages` ranks (1: not divided)."""
        ranks = self._basis.setting.world_size
        # the least part of the work of one stage, if all stages are equal and none waits;
        # where ranks share cores, a rank that waits leaves its cores to the others
        paces = self._cluster.shared_core_factors(stages) if stages > 1 else ()
        part = 1.0 / max([stages, *((n + 1) / pace for n, pace in enumerate(paces))])
        share = part * stages
        work = sum(max(product * share / ranks, issued * part) for product, issued in self._least)
        return self._update / ranks + work

    def whole(self) -> float:
        """The least seconds of a rank that computes the whole model and batch."""
        return self._update + sum(max(product, issued) for product, issued in self._least)


def _local(basis: Basis, candidate: Candidate) -> tuple[int, int]:
    """Rows and tokens of one microbatch on one rank; without a sequence, a row is a token."""
    batch, point = basis.setting.batch, candidate.point
    rows = candidate.problem.tape.rows
    for name, t in batch.tensors():
        if t.dim() > 1 and t.shape[1] == batch.sequence_length:
            local = basis.local_shape(name, tuple(t.shape), dict(point.degrees), point.microbatches)
            return rows, rows * local[1]
    return rows, rows * (batch.sequence_length or 1)


def floor_of(search: Search, cluster: Cluster, exact: Sequence[Candidate]) -> Floor:
    """The bound from the tape of one of these candidates, one with whole sequences where there is one."""
    basis = search.basis
    length = search.setting.batch.sequence_length or 1
    sizes = ((c, *_local(basis, c)) for c in exact)
    candidate = next((c for c, rows, tokens in sizes if tokens == rows * length), exact[0])
    other = None
    # the tape of the whole batch need not be scaled
    if candidate.problem.tape.rows != search.setting.batch.size:
        degrees = {axis: candidate.point.degree(axis) for axis in search.setting.strategies}
        other = search.shared.tapes.other(basis, degrees, candidate.point.microbatches)
    return Floor(basis, cluster, candidate, other)


def _products(tape: Tape, sequence: bool) -> dict[int, tuple[frozenset[str], int]]:
    """Products of weights with values computed from the batch: node -> names of its inputs, and rows (or tokens) of the values."""
    # values that are computed from rows of the batch; others (positions, products of weights) do not grow with them
    inputs = ((i, v) for i, v in enumerate(tape.values) if (v.name or "").startswith("input:"))
    flows = {i for i, value in inputs if value.shape[:1] == (tape.rows,)}
    for node in tape.nodes:
        if not flows.isdisjoint(ref.i for ref in node.ins):
            flows.update(ref.i for ref in node.outs)
    return {
        k: (frozenset(tape.values[r.i].name or "" for r in node.ins), length)
        for k, node in enumerate(tape.nodes)
        if (length := _length(node, tape, flows, sequence))
    }


def _length(node: Node, tape: Tape, flows: set[int], sequence: bool) -> int:
    """Rows (or tokens) of the operand of a product of a weight with values from the batch; 0 for other nodes."""
    weights = {r.i for r in node.ins if (tape.values[r.i].name or "").startswith("param:")}
    if not any(len(tape.values[i].shape) > 1 for i in weights):
        return 0
    for ref in node.ins:
        shape = tape.values[ref.i].shape
        if ref.i not in weights and ref.i in flows and len(shape) > 1:
            if node.name == "linear" or len(shape) == 2:
                return math.prod(shape[:-1])
            # convolutions count rows
            return 0 if sequence else int(shape[0])
    return 0


def _least(cluster: Cluster, work: Work, flops: float) -> tuple[float, float]:
    """Seconds of this many FLOPs of a product at the best rate, and of issuing one occurrence, forward and backward.

    Issuing counts however small the tensors are.
    """
    launches = cluster.launch_s + (cluster.backward_launch_s if work.grad else 0.0) + cluster.host_s
    is_product = work.kind == "matmul"
    operands = min(work.inputs_back, 2) / 2 if is_product else 1.0
    measured = cluster.measured(work.kind, work.dtype) or cluster.measured(work.kind, "float32")
    if measured is None:
        product = flops / cluster.rate(work.dtype) * (1.0 + (BACKWARD * operands if work.grad else 0.0))
        return product if is_product else 0.0, launches
    product = flops * _least_rate(measured.forward)
    product += flops * _least_rate(measured.backward) * operands if work.grad else 0.0
    least = min((s for _, s in measured.forward), default=0.0)
    least += min((s for _, s in measured.backward), default=0.0) * operands if work.grad else 0.0
    shown = work.kind == "view" or not cluster.hides_launch
    issued = least + cluster.host_s if shown else max(least, launches)
    return product if is_product else 0.0, issued


def _least_rate(points: Points) -> float:
    """Seconds of one unit at the best measured rate. Between and beyond the points no rate is better."""
    return min((seconds / size for size, seconds in points), default=0.0)
