"""Live ranges in the forward pass of tensors that autograd does not save: from the operation that makes one to its last reader.

Examples are tensors computed without gradients, and tensors held in a list until they are concatenated.
"""

from __future__ import annotations

import itertools

from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.op_kinds import VIEWS, base_name

Spans = tuple[tuple[int, int, int, int], ...]
"""(node, number of its output, first and last place among the representative nodes at which it counts) of each storage that
the representative nodes make, independent of their sizes."""


def forward_alive(problem: PlacementProblem, placement: Placement) -> list[float]:
    """Per representative node, the bytes that are alive while it runs forward."""
    tape, share, options = problem.tape, problem.costs.share, placement.options
    changes = [0.0] * (len(problem.quotient.nodes) + 1)
    for k, slot, begin, end in live_ranges(problem):
        size = tape.values[tape.nodes[k].outs[slot].i].nbytes * share(options[k].outs[slot])
        changes[begin] += size
        changes[end + 1] -= size
    return list(itertools.accumulate(changes[:-1]))


def live_ranges(problem: PlacementProblem) -> Spans:
    """The live ranges of a problem's tape, cached for all tapes that differ in sizes only."""
    key = ("living", problem.tape.recompute)
    return problem.quotient.once_for(problem.tape, key, lambda _: _found(problem))


def _found(problem: PlacementProblem) -> Spans:
    tape, quotient = problem.tape, problem.quotient
    nodes = list(quotient.nodes)
    place = {k: n for n, k in enumerate(nodes)}
    # value -> the first value of its storage
    root: dict[int, int] = {}
    made: dict[int, tuple[int, int]] = {}
    last: dict[int, int] = {}
    for n, k in enumerate(nodes):
        node = tape.nodes[k]
        for ref in node.ins:
            source = root.get(quotient.value(ref.i))
            if source is not None:
                last[source] = n
        name = base_name(node)
        in_place = name.endswith("_") and not name.startswith("__")
        # the output shares the storage of the input
        shares = node.op is not None and node.ins and (name in VIEWS or in_place)
        for slot, ref in enumerate(node.outs):
            value = quotient.value(ref.i)
            if shares:
                source = root.get(quotient.value(node.ins[0].i))
                # a view of a parameter or an input has no new storage
                if source is not None:
                    root[value] = source
            elif value not in root:
                root[value], made[value], last[value] = value, (k, slot), n
    for result in tape.results:
        source = root.get(quotient.value(result))
        if source is not None:
            last[source] = len(nodes) - 1
    # the place from which it counts as saved
    kept: dict[int, int] = {}
    for item in tape.saved:
        source = None if item.root is None else root.get(quotient.value(item.root))
        if source is not None:
            kept.setdefault(source, place[quotient.node(item.node)])
    ends = {value: min(last[value], kept.get(value, len(nodes)) - 1) for value in made}
    return tuple((k, slot, place[k], ends[v]) for v, (k, slot) in made.items() if place[k] <= ends[v])
