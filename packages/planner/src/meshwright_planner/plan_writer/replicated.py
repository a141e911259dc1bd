"""Notes on what all ranks of a searched axis have or do alike: work that they repeat, weights that each of them holds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator

from meshwright_dtensor.sharding.states import is_shard
from meshwright_dtensor.utils.names import listing
from meshwright_planner.cost.prices import along
from meshwright_planner.evaluation.candidate import Candidate
from meshwright_planner.placement.legal_rows import Option
from meshwright_planner.plan_writer.patterns import Collapser

NOTED = 0.1
"""Part of all products and attention from which replicated work gets a note."""

MODULES = 2
"""The most modules that a note on replicated work names."""

WEIGHTS = 0.8
"""Part of the weights from which an axis that divides them gets no note."""

_RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})
"""Functions that run all steps of a recurrent layer."""

_STEPS = "each step of a recurrent layer needs the whole hidden state"


def idle_axes(candidate: Candidate) -> Iterator[str]:
    """A note for each searched axis that leaves a large part of the work replicated, with the reason and a fix."""
    problem, options = candidate.problem, candidate.placement.options
    for place, axis in enumerate(candidate.searched):
        total, replicated, nodes = 0.0, Counter[str](), []
        for k, option in options.items():
            call = problem.tape.nodes[k].call
            module = "" if call is None else call.module
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
        uneven = f"none of its sizes (features, heads) can be divided by {degree}"
        why = "dividing it takes longer, or more memory" if _divided(legal, place) else uneven
        most = max(replicated, key=replicated.__getitem__)
        calls = {problem.tape.nodes[k].call for k in nodes}
        if any(c and c.module == most and c.function in _RECURRENT for c in calls):
            why = _STEPS
        fix = f"{why}; give {axis} another degree, or its ranks to another axis"
        if share >= 1.0:
            yield f"no computation is divided along {axis} {degree}: all its ranks do the same work, because {fix}"
            continue
        modules = [name or "the model itself" for name, work in replicated.most_common() if work]
        yield (
            f"all ranks of {axis} {degree} repeat {100 * share:.0f}% of products and attention ({listing(modules, MODULES)}, and "
            f"copies of them), because {fix}"
        )


def _divided(options: Iterable[Option], place: int) -> bool:
    """Whether one of these options has a tensor that is sharded on the axis at `place`."""
    states = (state for option in options for state in (*option.ins, *option.outs))
    return any(state is not None and is_shard(along(state)[place]) for state in states)


def whole_weights(candidate: Candidate) -> Iterator[str]:
    """A note for each searched axis that leaves many weights whole on each rank: the modules, and why."""
    problem, stored = candidate.problem, candidate.placement.stored
    values = {n: v for n, v in problem.tape.parameters.items() if n not in candidate.placements}
    sizes = {name: math.prod(problem.tape.values[value].shape) for name, value in values.items()}
    total, collapser = sum(sizes.values()), Collapser(problem.quotient.groups)
    for place, axis in enumerate(candidate.searched):
        # by pattern, for all copies of a module
        whole, largest = Counter[str](), dict[str, str]()
        for name, size in sizes.items():
            state = stored.get(problem.quotient.value(values[name]), problem.whole)
            if not is_shard(along(state)[place]):
                module = collapser.pattern(name.rpartition(".")[0])
                whole[module] += size
                largest[module] = max(largest.get(module, name), name, key=sizes.__getitem__)
        divided = 1 - sum(whole.values()) / total if total else 1.0
        if divided >= WEIGHTS:
            continue
        modules = []
        for module, size in whole.most_common(MODULES):
            kind = problem.tape.modules[largest[module].rpartition(".")[0]].kind
            why = _why_whole(candidate, values[largest[module]], place)
            modules.append(f"{module or 'the model itself'} ({kind}, {100 * size / total:.0f}%: {why})")
        degree = candidate.point.degree(axis)
        yield (
            f"{axis} {degree} shards {100 * divided:.0f}% of the weights. Most of those that each rank has whole are in "
            f"{listing(modules, MODULES)}"
        )


def _why_whole(candidate: Candidate, parameter: int, place: int) -> str:
    """Why a parameter is not sharded along the searched axis at `place`."""
    problem = candidate.problem
    value = problem.quotient.value(parameter)
    pins = problem.pins.get(value)
    if pins is not None and pins[place] is not None:
        return "as requested"
    nodes = [problem.tape.nodes[k] for k in problem.quotient.nodes]
    calls = {n.call.function for n in nodes if n.call and any(r.i == value for r in n.ins)}
    if calls & _RECURRENT:
        return _STEPS
    shards = [s for s in problem.storable(value, False) if is_shard(along(s)[place])]
    if not shards:
        return f"no size is a multiple of {candidate.point.degree(candidate.searched[place])}"
    if not problem.usable(value, shards):
        return "what reads them takes them whole"
    return "sharding them takes longer, or more memory"
