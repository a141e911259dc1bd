"""Searched axes whose ranks do the same work: of all that is computed, or of a part worth a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from meshwright_dtensor.sharding.states import is_shard
from meshwright_dtensor.utils.names import listing
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.placement.solution import along

WORTH_A_LINE = 0.1
"""Part of all products and attention: less of it done by every rank alike is not named."""

NAMED = 2
"""Modules that are named at most."""


def idle_axes(candidate: Candidate) -> Iterator[str]:
    """A line for each searched axis of the candidate whose ranks do a good part of the work alike, and why."""
    problem, options = candidate.problem, candidate.placement.options
    for place, axis in enumerate(candidate.searched):
        every, alike, nodes = 0.0, Counter[str](), []
        for k, option in options.items():
            module = _module(candidate, k)
            if any(f"{module}.".startswith(f"{name}.") for name in candidate.apart):
                continue  # a strategy runs that, and divides it itself
            work = problem.legality.flops(k) * problem.quotient.node_count[k]
            every += work
            if not _divided((option,), place):
                alike[module] += work  # type: ignore[assignment]
                nodes.append(k)
        share = sum(alike.values()) / every if every else 0.0
        if share < WORTH_A_LINE:
            continue
        degree = candidate.point.degree(axis)
        legal = (option for k in nodes for option in problem.options[k] if problem.legality.flops(k))
        why = (
            "to divide it takes longer, or more memory"
            if _divided(legal, place)
            else f"none of its sizes (features, heads) can be cut into {degree}"
        )
        fix = f"{why}; give {axis} another degree, or the ranks to another axis"
        if share >= 1.0:
            yield f"nothing that is computed is divided along {axis} {degree}: all its ranks do the same, since {fix}"
            continue
        modules = [name or "the model itself" for name, work in alike.most_common() if work]
        yield (
            f"{100 * share:.0f}% of products and attention ({listing(modules, NAMED)}, and copies of them) are done alike by all "
            f"ranks of {axis} {degree}, since {fix}"
        )


def _module(candidate: Candidate, node: int) -> str:
    call = candidate.problem.tape.nodes[node].call
    return "" if call is None else call.module


def _divided(options: Iterable[Option], place: int) -> bool:
    """Whether one of these has a tensor that is divided along the axis at `place`."""
    return any(
        state is not None and is_shard(along(state)[place])
        for option in options
        for state in (*option.ins, *option.outs)
    )
