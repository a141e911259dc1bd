"""Bytes that autograd saves under a given placement."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from meshwright_planner.placement.ilp import Placement

if TYPE_CHECKING:
    from meshwright_planner.placement.problem import PlacementProblem


@dataclass(frozen=True)
class SavedPlaces:
    """The saved tensors of a tape that count, independent of their sizes.

    Attributes:
        representative: (place in `tape.saved`, representative node) of one tensor per class of equal ones.
        copies: storage -> size of its class: storages that equal nodes make and equal nodes save.
        owned: (place, representative node) of all but parameters and buffers, each storage with the first node that saves it.
    """

    representative: tuple[tuple[int, int], ...]
    copies: dict[int, int]
    owned: tuple[tuple[int, int], ...]

    @staticmethod
    def of(problem: PlacementProblem) -> SavedPlaces:
        """The places of a problem's tape, cached for all tapes that differ in sizes only."""
        key = ("saved places", problem.tape.recompute)
        return problem.quotient.once_for(problem.tape, key, lambda _: _saved_places(problem))


def _saved_places(problem: PlacementProblem) -> SavedPlaces:
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
    classes: dict[object, int] = {}
    copies: dict[int, int] = {}
    for root, saved in users.items():
        # the producer counts too: the first block saves an output of the embedding, the others of blocks
        items = ((k, tape.saved[place]) for place, k in saved)
        kept = tuple((k, problem.slot(i.node, i.value, i.output), i.output) for k, i in items)
        first = classes.setdefault((quotient.value(root), kept), root)
        copies[first] = copies.get(first, 0) + 1
        if first == root:
            representative += saved
    return SavedPlaces(tuple(sorted(representative)), copies, tuple(owned))


def kept_bytes(problem: PlacementProblem, placement: Placement) -> float:
    """Bytes that autograd saves on one rank, each storage once (as the integer program counts)."""
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
        stored = placement.stored.get(quotient.value(item.root), "I")
        if tape.lasts(item.root) and costs.split((stored,)) == split:
            # a parameter in its stored state costs nothing more
            continue
        size = item.nbytes * places.copies[item.root] * costs.part(split)
        kept[item.root, split] = max(kept.get((item.root, split), 0.0), size)
    return sum(kept.values())
