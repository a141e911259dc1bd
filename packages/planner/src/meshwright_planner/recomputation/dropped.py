"""What a module that runs again has alive while it does: all that autograd keeps of it then, less what it kept anyway."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright_planner.placing.placement import Placement, PlacementProblem
from meshwright_planner.profile.tape import Saved


@dataclass(frozen=True)
class Dropped:
    """The saved tensors that a block gives up; of blocks that are alike there is one.

    Attributes:
        nodes: its representative nodes.
        storages: those of each storage, as (place in `tape.saved`, representative node).
    """

    nodes: frozenset[int]
    storages: tuple[tuple[tuple[int, int], ...], ...]


def dropped(
    problem: PlacementProblem, block: Mapping[int, str], left: Iterable[Saved]
) -> tuple[Dropped, ...]:
    """Those of every block; `block`: node -> the one that it is of; `left`: what is kept all the same."""
    tape, quotient = problem.tape, problem.quotient
    staying = {item.root for item in left if item.root is not None}
    nodes: dict[str, set[int]] = {}
    for index, name in block.items():
        nodes.setdefault(name, set()).add(quotient.node(index))
    found: dict[str, dict[object, list[tuple[int, int]]]] = {name: {} for name in nodes}
    for place, item in enumerate(tape.saved):
        own = block.get(item.node)
        if own is not None and item.root not in staying:
            key = ("inner", place) if item.root is None else item.root
            found[own].setdefault(key, []).append((place, quotient.node(item.node)))
    alike: dict[object, Dropped] = {}
    for name, storages in found.items():
        one = Dropped(frozenset(nodes[name]), tuple(map(tuple, storages.values())))
        sizes = tuple(tuple((k, tape.saved[p].nbytes) for p, k in storage) for storage in one.storages)
        alike.setdefault((one.nodes, sizes), one)
    return tuple(alike.values())


def alive_again(
    problem: PlacementProblem, placement: Placement, blocks: Sequence[Dropped]
) -> dict[int, float]:
    """Representative node -> bytes that its block has alive beside what is left of it, while it runs backward."""
    tape, quotient, costs = problem.tape, problem.quotient, problem.costs
    options = placement.options
    parts = {
        k: costs.part(costs.split((*options[k].ins, *options[k].outs))) for one in blocks for k in one.nodes
    }
    alive: dict[int, float] = {}
    for one in blocks:
        total = 0.0
        for storage in one.storages:
            most = 0.0
            for place, k in storage:
                item = tape.saved[place]
                if item.root is None:
                    most = max(most, problem.kept_bytes(item) * parts[k])
                    continue
                # the tensor is that of the copy, its state that of the node that it is a copy of
                slot = problem.slot(item.node, item.value, item.output)
                states = options[k].outs if item.output else options[k].ins
                split = costs.split(states if slot is None else states[slot : slot + 1])
                if tape.lasts(item.root):
                    if costs.split((placement.stored.get(quotient.value(item.root), "I"),)) == split:
                        continue  # there anyway
                most = max(most, item.nbytes * costs.part(split))
            total += most
        for k in one.nodes:
            alive[k] = max(alive.get(k, 0.0), total)
    return alive
