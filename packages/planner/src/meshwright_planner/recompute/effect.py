"""The effect of recompute on a placement: saved tensors, seconds, communication, and the tensors that are alive again."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from meshwright_dtensor.plan import RecomputeRule
from meshwright_planner.cost.prices import more_forward
from meshwright_planner.memory.liveness import forward_alive
from meshwright_planner.placement.ilp import Conversion
from meshwright_planner.placement.problem import Placement, PlacementProblem
from meshwright_planner.recompute.region import Region
from meshwright_planner.trace.tape import Saved


def recomputed(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> tuple[PlacementProblem, Placement, dict[int, float]]:
    """The same placement where the modules of `rules` are recomputed, and their live bytes during recompute.

    A module keeps its inputs. "selective" also keeps the results of products and attention, "alternate" those of attention
    and of every other product. The forward pass and its communication run once more, as far as torch recomputes (see
    `Region.repeated`). The last result: representative node -> bytes that its module has alive in addition to kept tensors.
    """
    region = _region(problem, rules)
    kept = region.saved(problem.tape)
    tape = replace(problem.tape, saved=kept, recompute=tuple(rules))
    other, key = problem.on(tape), ("dropped", tuple(rules))
    blocks = problem.quotient.once_for(problem.tape, key, lambda _: dropped(problem, region.block, kept))
    again, options = region.again, {}
    for k, option in placement.options.items():
        seconds, forward = more_forward(option.seconds, option.forward, again[k])
        inner_seconds = option.inner_seconds * (1 + again[k])
        options[k] = replace(option, seconds=seconds, forward=forward, inner_seconds=inner_seconds)
    conversions = communicated(problem, placement, rules)
    counts, costs = problem.quotient.node_count, problem.costs
    between = sum(costs.collective(c.collective) * c.count for c in conversions)
    inner = sum(option.inner_seconds * counts[k] for k, option in options.items())
    recomputed_placement = replace(
        placement,
        options=options,
        conversions=conversions,
        compute_seconds=sum(option.seconds * counts[k] for k, option in options.items()),
        communication_seconds=between + inner,
        saved_bytes=other.saved.total(placement),
        again=again,
    )
    return other, recomputed_placement, alive_again(problem, placement, blocks, again)


def communicated(
    problem: PlacementProblem, placement: Placement, rules: Sequence[RecomputeRule]
) -> list[Conversion]:
    """The conversions of a placement where the modules of `rules` are recomputed."""
    again = _region(problem, rules).again

    def times(c: Conversion) -> int:
        return c.count + round(c.count * max((again[n] for n, _ in c.consumers if n in again), default=0))

    return [replace(c, count=times(c)) if c.phase == "forward" else c for c in placement.conversions]


def _region(problem: PlacementProblem, rules: Sequence[RecomputeRule]) -> Region:
    tape, quotient, flops = problem.tape, problem.quotient, problem.legality.flops
    return quotient.memo.once(("recomputed", tuple(rules)), lambda: Region(tape, quotient, flops, rules))


@dataclass(frozen=True)
class Dropped:
    """The saved tensors that a recomputed block drops; equal blocks share one.

    Attributes:
        nodes: the representative nodes of the block, in the order in which they run.
        storages: the tensors of each storage, as (index among the saved tensors, representative node).
        by_model: a checkpoint in the user's model drops them, so they are in `tape.dropped`, not in `tape.saved`.
    """

    nodes: tuple[int, ...]
    storages: tuple[tuple[tuple[int, int], ...], ...]
    by_model: bool = False


def dropped(
    problem: PlacementProblem, block: Mapping[int, str], left: Iterable[Saved], by_model: bool = False
) -> tuple[Dropped, ...]:
    """The dropped tensors of every block.

    `block`: node -> its block; `left`: saved tensors that are kept; `by_model`: see `Dropped`.
    """
    saved = problem.tape.dropped if by_model else problem.tape.saved
    quotient = problem.quotient
    staying = {item.root for item in left if item.root is not None}
    nodes: dict[str, dict[int, None]] = {}
    for index, name in block.items():
        nodes.setdefault(name, {})[quotient.node(index)] = None
    storages: dict[str, dict[object, list[tuple[int, int]]]] = {name: {} for name in nodes}
    for place, item in enumerate(saved):
        owner = block.get(item.node)
        if owner is not None and item.root not in staying:
            key = ("inner", place) if item.root is None else item.root
            storages[owner].setdefault(key, []).append((place, quotient.node(item.node)))
    distinct: dict[object, Dropped] = {}
    for name, by_storage in storages.items():
        tensors = Dropped(tuple(nodes[name]), tuple(map(tuple, by_storage.values())), by_model)
        sizes = tuple(tuple((k, saved[p].nbytes) for p, k in storage) for storage in tensors.storages)
        distinct.setdefault((tensors.nodes, sizes), tensors)
    return tuple(distinct.values())


def checkpoint_dropped(problem: PlacementProblem) -> tuple[Dropped, ...]:
    """The tensors that checkpoints in the user's model drop; nested checkpoints count as the outermost."""
    tape = problem.tape
    nodes = Counter(number for inside in tape.inside for number in inside)
    outermost = (max(inside, key=lambda n: nodes[n], default=None) for inside in tape.inside)
    block = {index: str(number) for index, number in enumerate(outermost) if number is not None}
    return dropped(problem, block, tape.saved, by_model=True)


def alive_again(
    problem: PlacementProblem, placement: Placement, blocks: Sequence[Dropped], again: Mapping[int, float]
) -> dict[int, float]:
    """Representative node -> bytes that its block has alive in addition to kept tensors, while it runs backward.

    The last node also counts the recompute itself: the tensors saved so far, and the live tensors of the forward pass.
    `again`: representative node -> the part of its copies that run twice.
    """
    quotient = problem.quotient
    forward = dict(zip(quotient.nodes, forward_alive(problem, placement), strict=True))
    alive: dict[int, float] = {}
    for block in blocks:
        saved = problem.tape.dropped if block.by_model else problem.tape.saved
        kept = dict.fromkeys(block.nodes, 0.0)
        # the tensors of a storage are in the order in which their nodes run
        for storage in block.storages:
            kept[storage[0][1]] += max(_size(problem, placement, saved[place], k) for place, k in storage)
        *before, whole = itertools.accumulate(kept.values())
        # the result of the last operation is not recomputed
        most = max((size + forward[k] for size, k in zip(before, kept) if again.get(k)), default=0.0)
        for k in kept:
            alive[k] = max(alive.get(k, 0.0), whole)
        last = block.nodes[-1]
        alive[last] = max(alive[last], most)
    return alive


def _size(problem: PlacementProblem, placement: Placement, item: Saved, k: int) -> float:
    """Bytes on one rank of a saved tensor of a copy of node `k`, which has the state of `k`."""
    costs, option = problem.costs, placement.options[k]
    if item.root is None:
        return problem.saved.nbytes(item) * costs.part(costs.split((*option.ins, *option.outs)))
    split = problem.saved.split(item, option)
    stored = placement.stored.get(problem.quotient.value(item.root), "I")
    if problem.tape.lasts(item.root) and costs.split((stored,)) == split:
        return 0.0
    return item.nbytes * costs.part(split)
