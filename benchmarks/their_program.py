"""What the program of a published row spends beyond a plan, where its source says that it does more.

For predictions of that row; plans do not use it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from fused_saving import OneRank
from torch import nn

from meshwright_dtensor.cluster import CollectiveKind, Link
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
