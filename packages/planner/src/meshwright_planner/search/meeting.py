"""The collectives for which rows of several data ranks meet, in a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace

from meshwright_dtensor.propagate.prediction import Moved
from meshwright_dtensor.strategy.strategy import CollectiveUse
from meshwright_planner.placing.placed import Placed
from meshwright_planner.recomputation.region import recomputed_blocks
from meshwright_planner.search.basis import Basis


def rows_meet(
    basis: Basis, placed: Placed, times: int, degrees: Mapping[str, int]
) -> Iterator[tuple[str, CollectiveUse, float]]:
    """(axis, collectives, seconds of one of them), of `times` microbatches; what runs again is sent again."""
    problem, tape = placed.problem, placed.problem.tape
    if tape.division is None:
        return
    again = tuple(f"{name}." for name in recomputed_blocks(tape, placed.recompute))
    states = {
        problem.quotient.value(ref.i): state
        for k, option in placed.placement.options.items()
        for ref, state in zip(tape.nodes[k].outs, option.outs)
    }
    counted: Counter[Moved] = Counter()
    for moved, count in tape.division.moved:
        twice = moved.phase == "forward" and bool(again) and f"{moved.module}.".startswith(again)
        share = 1.0
        if moved.value is not None:  # what a searched axis has divided is moved by each of its ranks in part
            share = problem.costs.share(states.get(problem.quotient.value(moved.value), "I"))
        part = replace(moved, nbytes=round(moved.nbytes * share), value=None)
        counted[part] += count * times * (1 + twice)
    for m, count in counted.items():
        link = basis.link(degrees, m.axis)
        why = (
            m.why if m.why.startswith("inside ") else f"{m.why} for {m.function}: rows of several ranks meet"
        )
        use = CollectiveUse(m.kind, m.nbytes, count, m.phase, why, m.module)
        yield m.axis, use, link.seconds(m.kind, m.nbytes, degrees[m.axis])
