"""What the program of a published row spends beyond a plan, where its source says that it does more.

For predictions of that row; plans do not use it.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from fused_saving import OneRank
from published_rows import Row
from torch import nn

from meshwright_dtensor.cluster import Cluster, CollectiveKind, Link
from meshwright_dtensor.plan import ParallelPlan
from meshwright_dtensor.strategy.cost import TIED
from meshwright_planner.recompute.region import Region
from meshwright_planner.recompute.rules import recompute_rules
from meshwright_planner.trace.quotient import quotient


@dataclass(frozen=True)
class Group:
    """Tensor-parallel ranks: their link, how many, and whether they shard the sequence between products."""

    link: Link
    degree: int
    sequence: bool


class TheirProgram:
    """A step of one row on the ranks of a tensor-parallel group.

    Args:
        rank: the rows of the group, undivided.
        model, recompute: whose blocks are recomputed, and by which policy; None: nothing is.
        group: the ranks.
    """

    def __init__(self, rank: OneRank, model: nn.Module, recompute: str | None, group: Group) -> None:
        self._rank, self._group, self._degree = rank, group, group.degree
        rules = recompute_rules(model, recompute)
        self._region = Region(rank.tape, quotient(rank.tape), lambda index: rank.works[index].flops, rules)

    def loss(self, traffic: float) -> float:
        """Seconds of a loss that moves `traffic` bytes for each logit, beyond those of ours."""
        rank, seconds = self._rank, 0.0
        nodes, works, values = rank.tape.nodes, rank.works, rank.tape.values
        # the last product makes the logits
        last = max(index for index, work in enumerate(works) if work.flops)
        logits = math.prod(values[nodes[last].outs[0].i].shape)
        for index in range(last + 1, len(nodes)):
            seconds -= rank.timed(index)[0]
        return (seconds + traffic * logits / rank.costs.cluster.streams) / self._degree

    def scores(self, length: int) -> tuple[float, float]:
        """Seconds of the operations on matrices of scores, `length` by `length`: of one forward pass, and of all passes."""
        rank, forward, whole = self._rank, 0.0, 0.0
        for index, node in enumerate(rank.tape.nodes):
            shapes = (rank.tape.values[ref.i].shape[-2:] for ref in (*node.ins, *node.outs))
            if (length, length) in shapes:
                once, seconds = self._forward(index), rank.timed(index)[0]
                forward += once
                whole += seconds + once * (index in self._region.repeated)
        return forward / self._degree, whole / self._degree

    def ends(self) -> float:
        """Seconds of the ends of recomputed blocks, from where recomputation stops by default.

        torch stops where all saved tensors are there again: before the last product, and the sum of its parts over the ranks.
        """
        region, seconds = self._region, 0.0
        for index in region.policy.keys() - region.repeated:
            if not region.policy[index]:
                seconds += self._forward(index) / self._degree
                if self._rank.works[index].flops:
                    made = self._rank.tape.nodes[index].outs[0]
                    kind: CollectiveKind = "reduce_scatter" if self._group.sequence else "all_reduce"
                    seconds += self._moved(kind, self._rank.tape.values[made.i].nbytes)
        return seconds

    def undivided(self, gathered: Collection[str]) -> float:
        """Seconds that ranks spend in forward passes because the results of some modules are gathered, every pass again.

        `gathered`: ends of names of modules. Up to the next product every rank then computes the whole; that, and the backward
        pass, use the ranks' own part.
        """
        rank, seconds = self._rank, 0.0
        inside, whole = set[int](), set[int]()
        for index, node in enumerate(rank.tape.nodes):
            made = {ref.i for ref in node.outs}
            if node.module.endswith(tuple(gathered)):
                inside |= made
                continue
            passes = 1 + (index in self._region.repeated)
            arriving = inside.intersection(ref.i for ref in node.ins)
            seconds += passes * sum(self._moved("all_gather", rank.tape.values[i].nbytes) for i in arriving)
            inside -= arriving
            if (arriving or any(ref.i in whole for ref in node.ins)) and not rank.works[index].flops:
                whole |= made
                seconds += passes * self._forward(index) * (1 - 1 / self._degree)
            whole |= arriving
        return seconds

    def _forward(self, index: int) -> float:
        seconds, forward = self._rank.timed(index)
        return seconds * forward

    def _moved(self, kind: CollectiveKind, nbytes: float) -> float:
        """Seconds of a collective, with the copy that joins or parts what is strided in memory."""
        seconds = self._group.link.seconds(kind, nbytes, self._degree)
        copied = 0.0 if kind == "all_reduce" or self._degree == 1 else 2 * nbytes
        return seconds + copied / self._rank.costs.cluster.streams


def gradient_seconds(row: Row, plan: ParallelPlan, cluster: Cluster) -> float:
    """Seconds of a step by which gradients of two bytes each take longer than those of the plan, of four; mostly negative.

    Each microbatch but the first adds its gradients to those before: two reads and a write. Then they are summed over data ranks.
    """
    assert plan.predicted is not None and plan.predicted.split is not None
    ranks, nbytes = row.plan["dp"], plan.predicted.memory_bytes["gradients"] / 2
    sums = plan.predicted.split.exposed.get("dp", 0.0)
    seconds = -sums / 2
    if row.late_sums:
        link = cluster.running(row.gpus).link(row.gpus // ranks, ranks)
        seconds = link.seconds("all_reduce", nbytes, ranks) - sums
    times = row.accumulated if plan.pipeline is None else plan.pipeline.microbatches
    added = 0 if plan.pipeline is None or times == 1 else 2 * times
    return seconds + 3 * nbytes * (times - 1 - added) / cluster.streams


def message_seconds(row: Row, plan: ParallelPlan, cluster: Cluster) -> float:
    """Seconds of a step by which messages between stages take longer than in the plan (Narayanan et al., 2021, 4.1).

    Of each tensor the ranks of tp send a part over their own cards, and gather it after that. Each forward and backward of a
    stage exchanges one in each direction, and waits until all are there (megatron/p2p_communication.py).
    """
    assert plan.predicted is not None and plan.predicted.split is not None and plan.pipeline is not None
    tp, pp, cluster = row.plan["tp"], row.plan["pp"], cluster.running(row.gpus)
    over, between = cluster.link(row.gpus // pp, pp), [c for c in plan.collectives if c.axis == "pp"]
    tied = sum(c.count * over.seconds(c.kind, c.nbytes, pp) for c in between if c.why == TIED)
    nbytes = max(c.nbytes for c in between if c.why != TIED)
    sent = over.seconds("send_recv", nbytes / tp, pp)
    gathered = 2 * cluster.link(1, tp).seconds("all_gather", nbytes, tp)
    times = plan.pipeline.microbatches * len(plan.pipeline.stages) // pp
    return times * (sent + gathered) + tied - plan.predicted.split.exposed.get("pp", 0.0)
