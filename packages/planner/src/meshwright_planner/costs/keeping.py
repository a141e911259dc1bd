"""How many bytes autograd keeps under a placement that is given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from meshwright_planner.placing.placement import Placement, PlacementProblem


@dataclass(frozen=True)
class SavedPlaces:
    """Which of the saved tensors of a tape count, whatever their sizes.

    Attributes:
        representative: places in `tape.saved` of those of representative nodes.
        copies: representative storage -> how many it stands for.
        owned: (place, representative node) of all but parameters, each storage with the first node that keeps it.
    """

    representative: tuple[int, ...]
    copies: dict[int, int]
    owned: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: PlacementProblem) -> SavedPlaces:
        """Those of the tape of a problem, looked up once for it and for all that differ from it in sizes only."""
        tape = problem.tape
        like = tape if tape.origin is None else tape.origin
        # a quotient serves tapes of their own too, which may keep other tensors; the answer holds on to the one it is of
        _, found = problem.quotient.once(
            ("saved places", id(like), tape.recompute), lambda: (like, SavedPlaces._look(problem))
        )
        return found

    @staticmethod
    def _look(problem: PlacementProblem) -> SavedPlaces:
        tape, quotient = problem.tape, problem.quotient
        roots: dict[int, set[int]] = defaultdict(set)
        seen: set[int] = set()
        representative: list[int] = []
        owned: list[tuple[int, int]] = []
        for place, item in enumerate(tape.saved):
            node = quotient.node(item.node)
            if node == item.node:
                representative.append(place)
            if item.root is None:
                owned.append((place, node))
                continue
            roots[quotient.value(item.root)].add(item.root)
            if item.root not in seen and not (tape.values[item.root].name or "").startswith("param:"):
                seen.add(item.root)
                owned.append((place, node))
        copies = {root: len(own) for root, own in roots.items()}
        return SavedPlaces(tuple(representative), copies, tuple(owned))


def kept_bytes(problem: PlacementProblem, placement: Placement) -> float:
    """What autograd keeps on one rank under a placement, each storage once (as the integer program counts it)."""
    tape, quotient, costs = problem.tape, problem.quotient, problem.costs
    places = SavedPlaces.of(problem)
    kept: dict[object, float] = {}
    for number in places.representative:
        item = tape.saved[number]
        node, option = item.node, placement.options[item.node]
        if item.root is None:
            split = costs.split((*option.ins, *option.outs))
            kept["inner", number] = problem.kept_bytes(item) * quotient.node_count[node] * costs.part(split)
            continue
        root = quotient.value(item.root)
        split = problem.kept_split(item, option)
        if (tape.values[root].name or "").startswith("param:"):
            if costs.split((placement.stored.get(root, "I"),)) == split:
                continue  # a parameter in the state that it is stored in costs nothing more
        size = item.nbytes * places.copies[root] * costs.part(split)
        kept[root, split] = max(kept.get((root, split), 0.0), size)
    return sum(kept.values())
