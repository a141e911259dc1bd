"""What a module that runs again has alive while it does: all that autograd keeps of it then, less what it kept anyway."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright_planner.memory.liveness import LiveRanges
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.trace.tape import Saved


@dataclass(frozen=True)
class Dropped:
    """The saved tensors that a block gives up; of blocks that are alike there is one.

    Attributes:
        nodes: its representative nodes, in the order in which they run.
        storages: those of each storage, as (place among the saved tensors, representative node).
        own: they are those of `tape.dropped`, which a checkpoint of the model gives up, not of `tape.saved`.
    """

    nodes: tuple[int, ...]
    storages: tuple[tuple[tuple[int, int], ...], ...]
    own: bool = False


def dropped(
    problem: PlacementProblem, block: Mapping[int, str], left: Iterable[Saved]
) -> tuple[Dropped, ...]:
    """Those of every block; `block`: node -> the one that it is of; `left`: what is kept all the same."""
    return _dropped(problem, block, left, problem.tape.saved, False)


def own_dropped(problem: PlacementProblem) -> tuple[Dropped, ...]:
    """Those that the model's own checkpoints give up; of those in each other, all counts as the outermost's."""
    tape = problem.tape
    nodes = Counter(number for inside in tape.inside for number in inside)
    block = {
        index: str(max(inside, key=lambda n: nodes[n])) for index, inside in enumerate(tape.inside) if inside
    }
    return _dropped(problem, block, tape.saved, tape.dropped, True)


def _dropped(
    problem: PlacementProblem,
    block: Mapping[int, str],
    left: Iterable[Saved],
    saved: Sequence[Saved],
    by_model: bool,
) -> tuple[Dropped, ...]:
    quotient = problem.quotient
    staying = {item.root for item in left if item.root is not None}
    nodes: dict[str, dict[int, None]] = {}
    for index, name in block.items():
        nodes.setdefault(name, {})[quotient.node(index)] = None
    found: dict[str, dict[object, list[tuple[int, int]]]] = {name: {} for name in nodes}
    for place, item in enumerate(saved):
        own = block.get(item.node)
        if own is not None and item.root not in staying:
            key = ("inner", place) if item.root is None else item.root
            found[own].setdefault(key, []).append((place, quotient.node(item.node)))
    alike: dict[object, Dropped] = {}
    for name, storages in found.items():
        one = Dropped(tuple(nodes[name]), tuple(map(tuple, storages.values())), by_model)
        sizes = tuple(tuple((k, saved[p].nbytes) for p, k in storage) for storage in one.storages)
        alike.setdefault((one.nodes, sizes), one)
    return tuple(alike.values())


def alive_again(
    problem: PlacementProblem, placement: Placement, blocks: Sequence[Dropped], again: Mapping[int, float]
) -> dict[int, float]:
    """Representative node -> bytes that its block has alive beside what is left of it, while it runs backward.

    At the last one that is what it has when it runs forward again too: what it kept by then, and what lives there, as far as
    it does (`again`: representative node -> the part of its copies that run twice).
    """
    quotient = problem.quotient
    ahead = dict(zip(quotient.nodes, LiveRanges.of(problem).bytes(problem, placement), strict=True))
    alive: dict[int, float] = {}
    for one in blocks:
        saved = problem.tape.dropped if one.own else problem.tape.saved
        kept = dict.fromkeys(one.nodes, 0.0)
        for storage in one.storages:  # they are in the order in which they run, too
            kept[storage[0][1]] += max(_size(problem, placement, saved[place], k) for place, k in storage)
        *before, whole = itertools.accumulate(kept.values())
        # what the last operation gives is not made again
        most = max((size + ahead[k] for size, k in zip(before, kept) if again.get(k)), default=0.0)
        for k in kept:
            alive[k] = max(alive.get(k, 0.0), whole)
        last = one.nodes[-1]
        alive[last] = max(alive[last], most)
    return alive


def _size(problem: PlacementProblem, placement: Placement, item: Saved, k: int) -> float:
    """Bytes of a saved tensor of a copy of node `k`: its state is that of `k`."""
    tape, costs, option = problem.tape, problem.costs, placement.options[k]
    if item.root is None:
        return problem.kept_bytes(item) * costs.part(costs.split((*option.ins, *option.outs)))
    split = problem.kept_split(item, option)
    if tape.lasts(item.root):
        if costs.split((placement.stored.get(problem.quotient.value(item.root), "I"),)) == split:
            return 0.0
    return item.nbytes * costs.part(split)
