"""The predicted saving of a fusing compiler for a whole model on one rank, without a plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from meshwright_dtensor.cluster import Cluster
from meshwright_dtensor.rules.book import RuleBook
from meshwright_planner.cost.backward import BackwardTraffics
from meshwright_planner.cost.fusion import Fusion
from meshwright_planner.cost.prices import AxisCosts, Work, work_of
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.flops import by_name, forward_flops
from meshwright_planner.trace.recorder.record import record
from meshwright_planner.trace.tape import Tape


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
    states = [(("I",) * len(node.ins), ("I",) * len(node.outs)) for node in rank.tape.nodes]
    fusion = Fusion(rank.tape, rank.costs, rank.works.__getitem__, states.__getitem__)
    return fusion.saving().seconds
