"""Collectives of operations that combine batch rows of several ranks, such as a loss that averages over the batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright_dtensor.propagate.predict import PredictedMove
from meshwright_dtensor.strategy import CollectiveUse
from meshwright_planner.evaluation.placed_model import Placed
from meshwright_planner.recompute.region import recomputed_blocks


def row_collectives(
    placed: Placed, microbatches: int, degrees: Mapping[str, int]
) -> Iterator[tuple[str, CollectiveUse, float]]:
    """(axis, collectives of one step, seconds of one of them). A recomputed operation communicates again."""
    problem, tape = placed.problem, placed.problem.tape
    if tape.division is None:
        return
    recomputed = tuple(f"{name}." for name in recomputed_blocks(tape, placed.recompute))
    states = {
        problem.quotient.value(ref.i): state
        for k, option in placed.placement.options.items()
        for ref, state in zip(tape.nodes[k].outs, option.outs)
    }
    counted: Counter[PredictedMove] = Counter()
    for moved, count in tape.division.moved:
        twice = moved.phase == "forward" and bool(recomputed) and f"{moved.module}.".startswith(recomputed)
        share = 1.0
        if moved.value is not None:
            # of a value that a searched axis shards, each rank of that axis moves its part
            share = problem.costs.share(states.get(problem.quotient.value(moved.value), "I"))
        part = replace(moved, nbytes=round(moved.nbytes * share), value=None)
        counted[part] += count * microbatches * (1 + twice)
    for moved, count in counted.items():
        link, why = placed.basis.link(degrees, moved.axis), moved.why
        if not why.startswith("inside "):
            why = f"{why} for {moved.function}, which combines rows of several ranks"
        use = CollectiveUse(moved.kind, moved.nbytes, count, moved.phase, why, moved.module)
        yield moved.axis, use, link.seconds(moved.kind, moved.nbytes, degrees[moved.axis])
