"""Bytes that autograd saves under a given placement."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import dataclass

from meshwright_planner.cost.prices import AxisCosts
from meshwright_planner.placement.ilp import Placement
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.trace.quotient import Quotient
from meshwright_planner.trace.tape import Saved, Tape


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


class SavedTensors:
    """The saved tensors of a tape with these costs, whatever the placement."""

    def __init__(self, tape: Tape, quotient: Quotient, costs: AxisCosts) -> None:
        self.tape, self.quotient, self.costs = tape, quotient, costs
        # node -> saved tensors that the recorder never saw
        self._hidden: dict[int, list[Saved]] = defaultdict(list)
        for item in tape.saved:
            if item.root is None:
                self._hidden[item.node].append(item)

    @property
    def places(self) -> SavedPlaces:
        """The places of the tape, cached for all tapes that differ in sizes only."""
        key = ("saved places", self.tape.recompute)
        return self.quotient.once_for(self.tape, key, lambda _: self._places())

    def nbytes(self, item: Saved) -> int:
        """Bytes of a saved tensor on the cluster.

        Fused attention saves one float32 per row in addition to its inputs and output, whatever it saves on the machine of
        the recording.
        """
        node = self.tape.nodes[item.node]
        if item.root is None and node.name == "sdpa" and self.costs.cluster.fused_attention:
            rows = math.prod(self.tape.values[node.outs[0].i].shape[:-1])
            return 4 * rows if item is self._hidden[item.node][0] else 0
        return item.nbytes

    def split(self, item: Saved, option: Option) -> Hashable:
        """How a saved tensor of known storage is divided, with this option of the node that saves it."""
        states = option.outs if item.output else option.ins
        position = self.slot(item)
        return self.costs.split(states if position is None else states[position : position + 1])

    def slot(self, item: Saved) -> int | None:
        """Which input or output of the node that saves a tensor shares its storage."""
        node = self.tape.nodes[item.node]
        refs = node.outs if item.output else node.ins
        return next((i for i, r in enumerate(refs) if r.i == item.value), None)

    def total(self, placement: Placement) -> float:
        """Bytes that autograd saves on one rank, each storage once (as the integer program counts)."""
        tape, quotient, costs, places = self.tape, self.quotient, self.costs, self.places
        kept: dict[object, float] = {}
        for number, node in places.representative:
            item, option = tape.saved[number], placement.options[node]
            if item.root is None:
                split = costs.split((*option.ins, *option.outs))
                kept["inner", number] = self.nbytes(item) * quotient.node_count[node] * costs.part(split)
                continue
            split = self.split(item, option)
            stored = placement.stored.get(quotient.value(item.root), "I")
            if tape.lasts(item.root) and costs.split((stored,)) == split:
                # a parameter in its stored state costs nothing more
                continue
            size = item.nbytes * places.copies[item.root] * costs.part(split)
            kept[item.root, split] = max(kept.get((item.root, split), 0.0), size)
        return sum(kept.values())

    def _places(self) -> SavedPlaces:
        tape, quotient = self.tape, self.quotient
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
            kept = tuple((k, self.slot(item), item.output) for k, item in items)
            first = classes.setdefault((quotient.value(root), kept), root)
            copies[first] = copies.get(first, 0) + 1
            if first == root:
                representative += saved
        return SavedPlaces(tuple(sorted(representative)), copies, tuple(owned))
