"""How many bytes autograd keeps under a placement that is given."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright_planner.placing.placement import Placement, PlacementProblem


def kept_bytes(problem: PlacementProblem, placement: Placement) -> float:
    """What autograd keeps on one rank under a placement, each storage once (as the integer program counts it)."""
    tape, quotient, costs = problem.tape, problem.quotient, problem.costs
    copies: dict[int, set[int]] = defaultdict(set)
    for item in tape.saved:
        if item.root is not None:
            copies[quotient.value(item.root)].add(item.root)
    kept: dict[object, float] = {}
    for number, item in enumerate(tape.saved):
        node = quotient.node(item.node)
        if node != item.node:
            continue
        option = placement.options[node]
        if item.root is None:
            split = costs.split((*option.ins, *option.outs))
            kept["inner", number] = problem.kept_bytes(item) * quotient.node_count[node] * costs.part(split)
            continue
        root = quotient.value(item.root)
        split = problem.kept_split(item, option)
        if (tape.values[root].name or "").startswith("param:"):
            if costs.split((placement.stored.get(root, "I"),)) == split:
                continue  # a parameter in the state that it is stored in costs nothing more
        size = item.nbytes * len(copies[root]) * costs.part(split)
        kept[root, split] = max(kept.get((root, split), 0.0), size)
    return sum(kept.values())
