"""Seconds that a step takes at least, in whatever configuration of the same ranks.

Three facts hold for every configuration, whatever its degrees, placements, schedule or recomputation:

- Products with weights are divided by tokens, by weights or by modules, and over all axes together by no more than there are
  ranks; they run at no better rate than the best that the cluster reaches.
- Each recorded operation is issued at least once by the ranks that have its module: only stages of a pipeline share issuing.
- An optimizer's step moves the states of all trained parameters once, divided over no more than all ranks.

Products whose operand is not as long as the tokens of a rank (experts, scores of attention) count as issued only.  A product is
known to grow with the batch where two tapes of different rows say so, and counts once where none do.  Communication, bubbles
and what streams count as nothing: this is a bound, not an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from meshwright_dtensor.cluster import Cluster, MeasuredWork
from meshwright_dtensor.cluster.links import Points
from meshwright_dtensor.trace.graph import Node
from meshwright_planner.cost.operations import BACKWARD, OPTIMIZERS
from meshwright_planner.cost.prices import Work, work_of
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.evaluation.context import Basis
from meshwright_planner.evaluation.evaluator import Search
from meshwright_planner.trace.tape import Tape


class Floor:
    """The least that a step takes, by the number of ranks that share modules.

    Args:
        basis: of the search.
        cluster: whose figures costs go by.
        candidate: any that was costed: its tape says what is computed.
        other: the tape of the same with other rows (see `Tapes.other`); None where there is none.
    """

    def __init__(
        self, basis: Basis, cluster: Cluster, candidate: Candidate, other: Tape | None = None
    ) -> None:
        self._basis, self._cluster = basis, cluster
        setting, problem = basis.setting, candidate.problem
        tape, (rows, tokens) = problem.tape, _local(basis, candidate)
        by_rows, sequence = setting.batch.size / rows, setting.batch.sequence_length is not None
        lengths = _lengths(tape, sequence)
        others = {} if other is None else _alike(lengths, _lengths(other, sequence))
        self._update = _least_update(cluster, basis.bytes[1], OPTIMIZERS[setting.optimizer])
        self._least: list[
            tuple[float, float]
        ] = []  # per kind of node: of its products, whole, and of issuing it
        for k in problem.quotient.nodes:
            node, count = tape.nodes[k], problem.quotient.node_count[k]
            flops = problem.legality.flops(k)
            work = work_of(node, tape.values, tape.flows[k], flops)
            long = lengths[k].length if k in lengths else 0
            times = float(long in (rows, tokens))
            if other is not None and others.get(k, 0) * rows == long * other.rows:
                times *= by_rows
            product = _product(cluster, work, flops * times)
            self._least.append((count * product, count * _issued(cluster, work)))

    def seconds(self, stages: int) -> float:
        """With modules divided over `stages` ranks (1: not at all)."""
        part, ranks = _busiest(self._cluster, stages), self._basis.setting.world_size
        # a rank that waits leaves its cores to others: in a pipeline all may be that much faster
        faster = part * stages
        return self._update / ranks + sum(
            max(product * faster / ranks, issued * part) for product, issued in self._least
        )

    def whole(self) -> float:
        """Of a rank that computes all of it: as `seconds`, but nothing is divided."""
        return self._update + sum(max(product, issued) for product, issued in self._least)


def _local(basis: Basis, candidate: Candidate) -> tuple[int, int]:
    """Rows and tokens of what one rank computes at once; without a sequence, a row is a token."""
    batch, point = basis.setting.batch, candidate.point
    rows = candidate.problem.tape.rows
    for name, t in batch.tensors():
        if t.dim() > 1 and t.shape[1] == batch.sequence_length:
            local = basis.local_shape(name, tuple(t.shape), dict(point.degrees), point.microbatches)
            return rows, rows * local[1]
    return rows, rows * (batch.sequence_length or 1)


def floor_of(search: Search, cluster: Cluster, exact: Sequence[Candidate]) -> Floor:
    """What everything takes at least, by what one of these candidates computes: one with whole sequences where there is one."""
    basis = search.basis
    candidate = next((c for c in exact if _whole_sequence(basis, c)), exact[0])
    other = None
    if (
        candidate.problem.tape.rows != search.setting.batch.size
    ):  # else it is the whole batch, and nothing grows
        degrees = {axis: candidate.point.degree(axis) for axis in search.setting.strategies}
        other = search.shared.tapes.other(basis, search.rules, degrees, candidate.point.microbatches)
    return Floor(basis, cluster, candidate, other)


def _whole_sequence(basis: Basis, candidate: Candidate) -> bool:
    """Whether a rank has all tokens of its rows: what it computes over the rows of the batch is all there is."""
    rows, tokens = _local(basis, candidate)
    return tokens == rows * (basis.setting.batch.sequence_length or 1)


class _Product(NamedTuple):
    """A product of weights with what comes from the batch, which has so many rows (or tokens)."""

    weights: frozenset[str]
    length: int


def _lengths(tape: Tape, sequence: bool) -> dict[int, _Product]:
    """The products of a tape, by node."""
    flows = _from_the_batch(tape, tape.rows)
    found: dict[int, _Product] = {}
    for k, node in enumerate(tape.nodes):
        length = _length(node, tape, flows, sequence)
        if length:
            found[k] = _Product(frozenset(tape.values[r.i].name or "" for r in node.ins), length)
    return found


def _alike(some: Mapping[int, _Product], others: Mapping[int, _Product]) -> dict[int, int]:
    """Node of `some` -> length of the same product among `others`; one row may take a few nodes less, but has the same products."""
    if [one.weights for one in some.values()] != [one.weights for one in others.values()]:
        return {}
    return {k: one.length for k, one in zip(some, others.values(), strict=True)}


def _from_the_batch(tape: Tape, rows: int) -> set[int]:
    """Values that are computed from rows of the batch: what is not (positions, weights of weights) is no longer for more rows."""
    found = {
        i
        for i, value in enumerate(tape.values)
        if (value.name or "").startswith("input:") and value.shape[:1] == (rows,)
    }
    for node in tape.nodes:
        if not found.isdisjoint(ref.i for ref in node.ins):
            found.update(ref.i for ref in node.outs)
    return found


def _length(node: Node, tape: Tape, flows: set[int], sequence: bool) -> int:
    """Of a product of a weight with what comes from the batch, how many rows (or tokens) that has; else 0."""
    weights = {r.i for r in node.ins if (tape.values[r.i].name or "").startswith("param:")}
    if not any(len(tape.values[i].shape) > 1 for i in weights):
        return 0
    for ref in node.ins:
        shape = tape.values[ref.i].shape
        if ref.i not in weights and ref.i in flows and len(shape) > 1:
            if node.name == "linear" or len(shape) == 2:
                return math.prod(shape[:-1])
            return 0 if sequence else int(shape[0])  # convolutions: by rows
    return 0


def _known(cluster: Cluster, work: Work) -> MeasuredWork | None:
    return cluster.measured(work.kind, work.dtype) or cluster.measured(work.kind, "float32")


def _product(cluster: Cluster, work: Work, flops: float) -> float:
    """Seconds of so many operations at the best rate, forward and backward."""
    if work.kind != "matmul":
        return 0.0
    operands = min(work.inputs_back, 2) / 2
    known = _known(cluster, work)
    if known is None:
        return flops / cluster.rate(work.dtype) * (1.0 + (BACKWARD * operands if work.grad else 0.0))
    back = flops * _least_rate(known.backward) * operands if work.grad else 0.0
    return flops * _least_rate(known.forward) + back


def _least_rate(points: Points) -> float:
    """Seconds of one unit at the best measured rate: between points and beyond them it is no better."""
    return min((seconds / size for size, seconds in points), default=0.0)


def _issued(cluster: Cluster, work: Work) -> float:
    """Seconds that one occurrence takes at least, however small its tensors are."""
    launches = cluster.launch_s + (cluster.backward_launch_s if work.grad else 0.0) + cluster.host_s
    known = _known(cluster, work)
    if known is None:
        return launches
    least = min((s for _, s in known.forward), default=0.0)
    operands = min(work.inputs_back, 2) / 2 if work.kind == "matmul" else 1.0
    least += min((s for _, s in known.backward), default=0.0) * operands if work.grad else 0.0
    if work.kind == "view":
        return least + cluster.host_s
    return max(least, launches) if cluster.hides_launch else least + cluster.host_s


def _least_update(cluster: Cluster, nbytes: float, states: int) -> float:
    """Seconds of an optimizer's step over parameters of so many bytes, at the best rate."""
    known = cluster.measured("update", "float32")
    if known is not None:
        return (3 + 2 * states) / 7 * nbytes * _least_rate(known.forward)
    return nbytes * (3 + 2 * states) / cluster.streams


def _busiest(cluster: Cluster, stages: int) -> float:
    """The part of a model's work that the step of a pipeline lasts at least: a stage's, if all are equal and nobody waits."""
    company = cluster.shared_core_factors(stages) if stages > 1 else ()
    return 1.0 / max([stages, *((n + 1) / pace for n, pace in enumerate(company))])
