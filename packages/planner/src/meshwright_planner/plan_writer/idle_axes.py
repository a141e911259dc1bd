"""Notes on searched axes whose ranks all do the same work, for a large part of the model or all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from meshwright_dtensor.sharding.states import is_shard
from meshwright_dtensor.utils.names import listing
from meshwright_planner.cost.prices import along
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.placement.legal_rows import Option

NOTED = 0.1
"""Part of all products and attention from which replicated work gets a note."""

NAMED = 2
"""The most modules that a note names."""


def idle_axes(candidate: Candidate) -> Iterator[str]:
    """A note for each searched axis that leaves a large part of the work replicated, with the reason and a fix."""
    problem, options = candidate.problem, candidate.placement.options
    for place, axis in enumerate(candidate.searched):
        total, replicated, nodes = 0.0, Counter[str](), []
        for k, option in options.items():
            module = _module(candidate, k)
            if any(f"{module}.".startswith(f"{name}.") for name in candidate.strategy_modules):
                # the strategy that runs this module divides it itself
                continue
            work = problem.legality.flops(k) * problem.quotient.node_count[k]
            total += work
            if not _divided((option,), place):
                replicated[module] += work  # type: ignore[assignment]
                nodes.append(k)
        share = sum(replicated.values()) / total if total else 0.0
        if share < NOTED:
            continue
        degree = candidate.point.degree(axis)
        legal = (option for k in nodes for option in problem.options[k] if problem.legality.flops(k))
        why = (
            "dividing it takes longer, or more memory"
            if _divided(legal, place)
            else f"none of its sizes (features, heads) can be divided by {degree}"
        )
        fix = f"{why}; give {axis} another degree, or its ranks to another axis"
        if share >= 1.0:
            yield f"no computation is divided along {axis} {degree}: all its ranks do the same work, because {fix}"
            continue
        modules = [name or "the model itself" for name, work in replicated.most_common() if work]
        yield (
            f"all ranks of {axis} {degree} repeat {100 * share:.0f}% of products and attention ({listing(modules, NAMED)}, and "
            f"copies of them), because {fix}"
        )


def _module(candidate: Candidate, node: int) -> str:
    call = candidate.problem.tape.nodes[node].call
    return "" if call is None else call.module


def _divided(options: Iterable[Option], place: int) -> bool:
    """Whether one of these options has a tensor that is sharded on the axis at `place`."""
    return any(
        state is not None and is_shard(along(state)[place])
        for option in options
        for state in (*option.ins, *option.outs)
    )
