"""Placement problems small enough to try every answer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

from torch import nn

from meshwright_dtensor.rules.book import RuleBook
from meshwright_dtensor.sharding.states import State, forward_kind, is_shard
from meshwright_planner.clusters.registry import LAPTOP_CPU
from meshwright_planner.cost.prices import AxisCosts, backward_move, convertible, forward_move, inner_dim
from meshwright_planner.placement.ilp import MemoryTerms
from meshwright_planner.placement.legal_rows import Legality, Option
from meshwright_planner.placement.problem import RESULT, PlacementProblem
from meshwright_planner.trace.batch import Batch
from meshwright_planner.trace.quotient import quotient
from meshwright_planner.trace.recorder.record import record

BOOK = RuleBook.first_party()
FREE = MemoryTerms(price=0.0, parameter_factor=4.0)


def problem_of(model: nn.Module, batch: Batch, degree: int = 2, merge: bool = True) -> PlacementProblem:
    tape = record(model, batch, BOOK.composites)
    costs = AxisCosts(LAPTOP_CPU, LAPTOP_CPU.link(1, degree), degree)
    return PlacementProblem(Legality(tape, quotient(tape, merge), BOOK, costs))


def bytes_of(
    problem: PlacementProblem,
    options: Mapping[int, Option],
    stored: Mapping[int, State],
    memory: MemoryTerms,
) -> float:
    """Bytes that a placement takes: parameters with their training state, and what autograd keeps."""
    values, share = problem.tape.values, problem.costs.share
    parameters = {v: s for v, s in stored.items() if (values[v].name or "").startswith("param:")}
    training = sum(memory.parameter_factor * values[v].nbytes * share(s) for v, s in parameters.items())
    given: Any = SimpleNamespace(options=options, stored=stored)
    return training + problem.saved.total(given)


def brute_force(
    problem: PlacementProblem, memory: MemoryTerms = FREE, divided: Collection[int] = ()
) -> float:
    """The least cost over every combination of options and of parameter states; infinite where none is legal.

    `memory`: what bytes are worth, and how many there are; `divided`: parameters that are stored sharded.
    """
    return min((cost for cost, _ in every_cost(problem, memory, divided)), default=float("inf"))


def every_cost(
    problem: PlacementProblem, memory: MemoryTerms = FREE, divided: Collection[int] = ()
) -> Iterator[tuple[float, float]]:
    """(cost, bytes) of every legal combination within the limit; bytes are 0 where nobody asks for them."""
    tape, costs = problem.tape, problem.costs
    names = [v for v in range(len(tape.values)) if (tape.values[v].name or "").startswith("param:")]
    stored = [
        [s for s in problem.legality.parameter_states(v) if is_shard(s) or v not in divided] for v in names
    ]
    counted = memory.price > 0 or memory.limit is not None
    nodes = problem.quotient.nodes
    for states in product(*stored):
        for options in product(*(problem.options[k] for k in nodes)):
            left: dict[int, State] = dict(zip(names, states))
            wanted: list[tuple[int, State, int]] = [(tape.results[0], "I", RESULT)]
            seconds = 0.0
            for k, option in zip(nodes, options):
                node = tape.nodes[k]
                wanted += [(r.i, s, k) for r, s in zip(node.ins, option.ins)]
                left.update({r.i: s for r, s in zip(node.outs, option.outs)})
                seconds += option.seconds + option.inner_seconds
            events = set()
            for value, target, reader in wanted:
                source, nbytes = left.get(value, "I"), tape.values[value].nbytes
                inner = inner_dim(tape.values[value].shape)
                # a weight is not moved, and within a call of a torch function nothing is
                fixed = (value in names and source != "I") or problem.inside_one_call(value, reader)
                if not convertible(source, target) or (fixed and source != target):
                    seconds = float("inf")
                    break
                events.add(
                    (value, "forward", forward_kind(target), forward_move(source, target, nbytes, inner))
                )
                if tape.grad[value]:
                    events.add((value, "backward", target, backward_move(source, target, nbytes, inner)))
            if seconds == float("inf"):
                continue
            seconds += sum(costs.collective(move) for _, _, _, move in events)
            used = 0.0
            if counted:
                used = bytes_of(problem, dict(zip(nodes, options)), dict(zip(names, states)), memory)
            if memory.limit is None or used <= memory.limit:
                yield seconds + memory.price * used, used
