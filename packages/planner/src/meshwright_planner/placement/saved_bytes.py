"""How many bytes autograd keeps under a placement that is given."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from meshwright_planner.placement.ilp import ProblemView
from meshwright_planner.placement.solution import Placement


@dataclass(frozen=True)
class SavedPlaces:
    """Which of the saved tensors of a tape count, whatever their sizes.

    Attributes:
        representative: (place in `tape.saved`, representative node) of those that others are like.
        copies: storage of theirs -> how many it stands for: all that come of alike nodes and are kept by alike nodes.
        owned: (place, representative node) of all but parameters and buffers, each storage with the first node that keeps it.
    """

    representative: tuple[tuple[int, int], ...]
    copies: dict[int, int]
    owned: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: ProblemView) -> SavedPlaces:
        """Those of the tape of a problem, looked up once for it and for all that differ from it in sizes only."""
        key = ("saved places", problem.tape.recompute)
        return problem.quotient.once_for(problem.tape, key, lambda _: SavedPlaces._look(problem))

    @staticmethod
    def _look(problem: ProblemView) -> SavedPlaces:
        tape, quotient = problem.tape, problem.quotient
        users: dict[int, list[tuple[int, int]]] = defaultdict(list)
        owned: list[tuple[int, int]] = []
        representative: list[tuple[int, int]] = []
        for place, item in enumerate(tape.saved):
            node = quotient.node(item.node)
            if item.root is None:
                owned.append((place, node))
                if node == item.node:
                    representative.append((place, node))
                continue
            if item.root not in users and not tape.lasts(item.root):
                owned.append((place, node))
            users[item.root].append((place, node))
        alike: dict[object, int] = {}
        copies: dict[int, int] = {}
        for root, own in users.items():
            # not by the nodes alone: the first block keeps what the embedding made, the others what blocks made
            kept = tuple((k, _slot(problem, place), tape.saved[place].output) for place, k in own)
            first = alike.setdefault((quotient.value(root), kept), root)
            copies[first] = copies.get(first, 0) + 1
            if first == root:
                representative += own
        return SavedPlaces(tuple(sorted(representative)), copies, tuple(owned))


def _slot(problem: ProblemView, place: int) -> int | None:
    item = problem.tape.saved[place]
    return problem.slot(item.node, item.value, item.output)


def kept_bytes(problem: ProblemView, placement: Placement) -> float:
    """What autograd keeps on one rank under a placement, each storage once (as the integer program counts it)."""
    tape, quotient, costs = problem.tape, problem.quotient, problem.costs
    places = SavedPlaces.of(problem)
    kept: dict[object, float] = {}
    for number, node in places.representative:
        item, option = tape.saved[number], placement.options[node]
        if item.root is None:
            split = costs.split((*option.ins, *option.outs))
            kept["inner", number] = problem.kept_bytes(item) * quotient.node_count[node] * costs.part(split)
            continue
        split = problem.kept_split(item, option)
        if tape.lasts(item.root):
            if costs.split((placement.stored.get(quotient.value(item.root), "I"),)) == split:
                continue  # what lasts, in the state that it is stored in, costs nothing more
        size = item.nbytes * places.copies[item.root] * costs.part(split)
        kept[item.root, split] = max(kept.get((item.root, split), 0.0), size)
    return sum(kept.values())
